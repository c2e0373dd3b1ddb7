"""Training steps of a model by one process or a group, and their comparison."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from quasar_kernels.reference import relative_rms
from tests.model import Batch, Model, QuasarAttention, Task

from fla.ops.quasar.layer import graphs  # isort: skip # tests.model mounts it

STEPS = 5


class Steps(NamedTuple):
    first: dict[str, torch.Tensor]  # the gradients of the first step
    moved: dict[str, torch.Tensor]  # the change of the parameters over all steps
    graphs: int  # number of CUDA graphs of the layers after the steps


def whole(x):
    """Return a copy of a tensor on the CPU, gathered if it is sharded."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu().clone()


def take_steps(device, task: Task, width: int, heads: int, way: str) -> Steps:
    """Train for a few steps on batches of two halves, alone or as a process of a group.

    A process alone trains on both halves.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = range(rank, 2, world)
    torch.manual_seed(0)
    model = Model(task.vocabulary, width, heads).to(device)
    run: torch.nn.Module = model
    if way == "ddp":
        run = DistributedDataParallel(model)
    elif way == "fsdp":
        mesh = init_device_mesh(device.type, (world,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    parameters = dict(model.named_parameters())
    before = {name: whole(p) for name, p in parameters.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    for step in range(STEPS):
        batch = Batch.draw(task, step, device)
        for part in (batch.part(half, 2) for half in mine):
            with torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
                logits = run(part.tokens, part.places)
            (part.loss(logits) / len(mine)).backward()
        if step == 0:
            first = {name: whole(p.grad) for name, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":  # poison freed memory, so that uses of stale addresses fail
            junk = [torch.full((n,), float("nan"), device=device) for n in (1 << 18, 1 << 20)]
            del junk
    moved = {name: whole(p) - before[name] for name, p in parameters.items()}
    layers = [m for m in model.modules() if isinstance(m, QuasarAttention)]
    kinds = [kind for layer in layers for kind in graphs._owners.get(layer, {}).values()]
    return Steps(first, moved, sum(isinstance(kind, graphs._Graph) for kind in kinds))


def assert_same(found: Steps, wanted: Steps, first: float, moved: float) -> None:
    """Compare the first gradients and the parameters' changes, by relative RMS errors."""
    for name, gradient in wanted.first.items():
        assert relative_rms(found.first[name], gradient) <= first, name
    for name, change in wanted.moved.items():
        assert relative_rms(found.moved[name], change) <= moved, name
