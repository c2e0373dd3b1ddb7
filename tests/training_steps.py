"""Steps of a recalling model alone, and on several devices: what both must agree on."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models.model import Model, recall_loss
from benchmarks.models.task import Task, draw
from benchmarks.models.ways import shard
from quasar_kernels.mount import mount
from quasar_kernels.reference import relative_rms

mount()

from fla.layers.quasar import QuasarAttention  # noqa: E402
from fla.ops.quasar.layer import replay  # noqa: E402

STEPS = 5


class Taken(NamedTuple):
    """Steps that were taken."""

    first: dict[str, torch.Tensor]  # the first step's gradients
    moved: dict[str, torch.Tensor]  # by how much all steps moved the parameters
    graphs: int  # CUDA graphs of the layers then


def whole(x):
    """A copy of a tensor in this process's memory, gathered where it is sharded."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu().clone()


def take_steps(device, task: Task, width: int, heads: int, way: str) -> Taken:
    """Take a few steps on batches of two halves, in this process or as one of its group's.

    A process that has both halves takes them one after the other.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = range(rank, 2, world)
    torch.manual_seed(0)
    model = Model(task.vocabulary, width, heads).to(device)
    run: torch.nn.Module = model
    if way == "ddp":
        run = DistributedDataParallel(model)
    elif way == "fsdp":
        shard(model, device, MixedPrecisionPolicy())
    parameters = dict(model.named_parameters())
    before = {name: whole(p) for name, p in parameters.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    for step in range(STEPS):
        batch = draw(task, step, device)
        for part in (batch.part(half, 2) for half in mine):
            with torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
                logits = run(part.tokens, part.places)
            (recall_loss(logits, part.answers) / len(mine)).backward()
        if step == 0:
            first = {name: whole(p.grad) for name, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":  # what was freed is not zeros: a stale address would show
            junk = [torch.full((n,), float("nan"), device=device) for n in (1 << 18, 1 << 20)]
            del junk
    moved = {name: whole(p) - before[name] for name, p in parameters.items()}
    layers = [m for m in model.modules() if isinstance(m, QuasarAttention)]
    kinds = [kind for layer in layers for kind in replay._owners.get(layer, {}).values()]
    return Taken(first, moved, sum(isinstance(kind, replay._Graph) for kind in kinds))


def assert_same(found: Taken, wanted: Taken, first: float, moved: float) -> None:
    """The gradients, and the sum of all steps, agree within these relative RMS errors."""
    for name, gradient in wanted.first.items():
        assert relative_rms(found.first[name], gradient) <= first, name
    for name, change in wanted.moved.items():
        assert relative_rms(found.moved[name], change) <= moved, name
