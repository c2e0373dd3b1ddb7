"""Models of QuasarAttention layers: compiled, checkpointed, and trained by several processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

from quasar_kernels.reference import relative_rms
from tests.model import Batch, Model, Task
from tests.quasar_kernels.parallel.processes import run_ranks
from tests.training_steps import Steps, assert_same, take_steps

CPU = torch.device("cpu")
SMALL = Task(vocabulary=96, tokens=64, places=8, batch=4)


def gradients(way: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = Model(SMALL.vocabulary, 32, 2), Batch.draw(SMALL, 0, CPU)
    model.checkpointed = way == "checkpointed"
    run: Any = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    with torch.autocast("cpu", torch.bfloat16):
        logits = run(batch.tokens, batch.places)
    loss = batch.loss(logits)
    torch.autograd.backward(loss)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return {"loss": loss.detach()} | found


@pytest.mark.parametrize("way", ["checkpointed", "compiled"])
def test_ways_of_one_process_give_the_same_gradients(way: str) -> None:
    torch.compiler.reset()
    found, wanted = gradients(way), gradients("eager")
    for name, gradient in wanted.items():
        # a compiled model computes the norms around the layers in another way
        assert torch.equal(found[name], gradient) or way != "checkpointed", name
        assert relative_rms(found[name], gradient) <= 5e-2, name


def take_steps_in_each_way(_: int) -> list[Steps]:
    return [take_steps(CPU, SMALL, 32, 2, way) for way in ("ddp", "fsdp")]


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one() -> None:
    wanted = take_steps(CPU, SMALL, 32, 2, "alone")
    assert max(change.abs().max() for change in wanted.moved.values()) > 0.1
    for found in run_ranks(2, take_steps_in_each_way)[0]:
        assert_same(found, wanted, 1e-6, 1e-4)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")  # torch warns of hooks on a CPU
def test_a_projection_may_be_sharded_by_itself() -> None:
    model, batch = Model(SMALL.vocabulary, 32, 2), Batch.draw(SMALL, 0, CPU)
    wanted = model(batch.tokens, batch.places)
    block: Any = model.blocks[0]
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(block.mixer.q_proj, mesh=mesh)
    found = model(batch.tokens, batch.places)
    assert relative_rms(found, wanted.double()) <= 1e-5
    found.sum().backward()
    assert block.mixer.q_proj.weight.grad is not None


@pytest.mark.usefixtures("alone")
def test_tensor_parallel_projections_are_refused() -> None:
    model, batch = Model(SMALL.vocabulary, 32, 2), Batch.draw(SMALL, 0, CPU)
    mixer: Any = model.blocks[0].mixer
    plan: dict[str, ParallelStyle] = {"q_proj": ColwiseParallel(use_local_output=False)}
    parallelize_module(mixer, init_device_mesh("cpu", (1,)), plan)
    with pytest.raises(TypeError, match=r"q_proj must return a plain tensor .* DTensor"):
        model(batch.tokens, batch.places)
