"""The ways to train a model: fp32, bf16, compiled, checkpointed, and on several GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models.model import Model


class Prepared(NamedTuple):
    """A model, ready for a way of training."""

    parameters: list[nn.Parameter]
    call: Callable[[Tensor, Tensor], Tensor]  # runs the model in the precision of the way


def prepare(model: Model, way: str, device: torch.device, backend: str = "inductor") -> Prepared:
    """Return `model`, on `device`, ready for a way of training.

    Args:
        way: a key of `cases.recall.WAYS`; `ddp` and `fsdp` need an initialized process group.
        backend: the backend of `torch.compile`.
    """
    if way == "fp32":
        torch.backends.cudnn.allow_tf32 = False  # matrix products are without TF32 by default
        model.compute_by_definition()
    model.checkpointed = way == "checkpointed"
    run: Any = model
    if way == "compiled":
        run = torch.compile(model, backend=backend)
    elif way == "ddp":
        run = DistributedDataParallel(model)
    elif way == "fsdp":
        shard(model, device, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    autocast = way not in ("fp32", "fsdp")  # FSDP2 gathers the parameters in bf16

    def call(tokens: Tensor, places: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, autocast):
            return run(tokens, places)  # type: ignore[no-any-return]

    return Prepared(list(model.parameters()), call)


def shard(model: Model, device: torch.device, policy: MixedPrecisionPolicy) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
