"""Models that learn to recall: the task, and the ways of training them."""

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

from benchmarks.cases.recall import HELD_OUT, Recipe, train
from benchmarks.models.model import Model, recall_loss
from benchmarks.models.processes import in_group
from benchmarks.models.task import Task, draw
from benchmarks.models.ways import prepare
from quasar_kernels.reference import relative_rms
from tests.small_fla import install_small_fla
from tests.training_steps import Steps, assert_same, take_steps

CPU = torch.device("cpu")
SMALL = Task(vocabulary=96, tokens=64, pairs=8, batch=4)


def test_each_key_is_queried_once_and_answered_by_its_value() -> None:
    task = Task(vocabulary=300, tokens=200, pairs=20, batch=50)
    tokens, places, answers = draw(task, 7, CPU)
    for row, queries, values in zip(
        tokens.tolist(), places.tolist(), answers.tolist(), strict=True
    ):
        pairs = dict(zip(row[:40:2], row[1:40:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == 20
        assert [pairs[row[place]] for place in queries] == values
        assert sorted(row[place] for place in queries) == sorted(pairs)
        rest = set(range(40, 200)) - set(queries)
        assert all(row[place] >= 200 for place in rest)  # noise, neither a key nor a value
    assert torch.equal(draw(task, 7, CPU).tokens, tokens)
    assert not torch.equal(draw(task, 8, CPU).tokens, tokens)


def test_no_step_trains_on_a_batch_that_is_held_out() -> None:
    task = Task(vocabulary=24, tokens=32, pairs=4, batch=2)
    held_out = draw(task, HELD_OUT, CPU).tokens
    assert not any(torch.equal(draw(task, step, CPU).tokens, held_out) for step in range(500))


@pytest.mark.parametrize("task", [Task(96, 31, 8, 1), Task(20, 64, 8, 1)])
def test_a_task_too_small_for_its_pairs_is_refused(task: Task) -> None:
    with pytest.raises(ValueError, match="8 pairs need 32 tokens and a vocabulary of 24"):
        draw(task, 0, CPU)


def gradients(way: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model(SMALL.vocabulary, 32, 2)
    prepared = prepare(model, way, CPU, backend="aot_eager")
    batch = draw(SMALL, 0, CPU)
    loss = recall_loss(prepared.call(batch.tokens, batch.places), batch.answers)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return {"loss": loss.detach()} | found


@pytest.mark.parametrize("way", ["fp32", "checkpointed", "compiled"])
def test_ways_of_one_process_give_the_same_gradients(way: str) -> None:
    torch.compiler.reset()
    found, wanted = gradients(way), gradients("bf16")
    for name, gradient in wanted.items():
        # a compiled model computes the norms around the layers in another way
        assert torch.equal(found[name], gradient) or way != "checkpointed", name
        assert relative_rms(found[name], gradient) <= 5e-2, name
    assert way != "fp32" or not torch.equal(found["loss"], wanted["loss"])


def take_steps_in_each_way(device: torch.device) -> list[Steps]:
    return [take_steps(device, SMALL, 32, 2, way) for way in ("ddp", "fsdp")]


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(install_small_fla(tmp_path))  # for the started processes
    wanted = take_steps(CPU, SMALL, 32, 2, "alone")
    assert max(change.abs().max() for change in wanted.moved.values()) > 0.1
    for found in in_group(2, "cpu", take_steps_in_each_way):
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
    model, batch = Model(SMALL.vocabulary, 32, 2), draw(SMALL, 0, CPU)
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
    model, batch = Model(SMALL.vocabulary, 32, 2), draw(SMALL, 0, CPU)
    mixer: Any = model.blocks[0].mixer
    plan: dict[str, ParallelStyle] = {"q_proj": ColwiseParallel(use_local_output=False)}
    parallelize_module(mixer, init_device_mesh("cpu", (1,)), plan)
    with pytest.raises(TypeError, match=r"q_proj must return a plain tensor .* DTensor"):
        model(batch.tokens, batch.places)


def test_a_training_ends_when_it_recalls() -> None:
    task = Task(vocabulary=6, tokens=4, pairs=1, batch=64)
    curve = train(CPU, "fp32", task, Recipe(most_steps=400, width=32, heads=2, rate=5e-3))
    assert 10 * len(curve.series["losses"]) == curve.figures["steps"] < 400
    assert curve.figures["recall"] > 0.99
