"""Calls of the layer and of a block on one of several ranks; imported by the ranks' processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from quasar_kernels.mount import mount

mount()

from fla.layers.quasar import QuasarAttention, QuasarCache  # noqa: E402
from fla.layers.quasar_adaptive import AdaptiveQuasarAttention  # noqa: E402
from fla.ops.quasar.parallel.context import build_cp_context  # noqa: E402

from quasar_kernels.blocks import HybridBlock  # noqa: E402

WIDTH, HEADS = 32, 2


class Case(NamedTuple):
    """A call of the layer, or of a block, on one row, cut into slices."""

    x: Tensor  # [1, T, WIDTH]
    dy: Tensor
    bounds: Sequence[int]
    lengths: Sequence[int]
    wrapped: str = ""  # ddp, fsdp, checkpoint, compile, hook
    conv: bool = True
    block: bool = False  # with all mixers
    adaptive: bool = False  # the layer of public Quasar models
    checkpoint_above: int | None = None  # of the block

    def make(self) -> nn.Module:
        """Return the same module on every rank."""
        torch.manual_seed(5)
        if self.block:
            return HybridBlock(WIDTH, HEADS, state=16, checkpoint_above=self.checkpoint_above)
        layer = make_layer(self.conv, self.adaptive)
        if self.wrapped == "hook":
            layer.v_proj.register_forward_hook(lambda module, args, y: 2 * y)
        return layer


def make_layer(conv: bool = True, adaptive: bool = False) -> Any:
    """Return the same layer on every rank."""
    torch.manual_seed(5)
    kind = AdaptiveQuasarAttention if adaptive else QuasarAttention
    return kind(WIDTH, WIDTH // HEADS, HEADS, use_short_conv=conv, layer_idx=0)


def rotation_of(layer: Any, tokens: slice) -> dict[str, Tensor]:
    """Return the rotary tables of the tokens for the adaptive layer, nothing for others."""
    if not isinstance(layer, AdaptiveQuasarAttention):
        return {}
    angles = torch.arange(tokens.start, tokens.stop)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
    return {"cos": angles.cos()[None, None], "sin": angles.sin()[None, None]}


class Mixed(nn.Module):
    """A model of one layer or block that takes a context."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, context: Any, **rotation: Tensor) -> Tensor:
        """Return the layer's output times 2, so that the model is more than the layer."""
        y: Tensor = 2 * self.layer(x, cp_context=context, **rotation)[0]
        return y


def run_layers(rank: int, cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    """Return y, dx and the summed gradients of the parameters by name, of each case."""
    return [_run(rank, case) for case in cases]


def _slice_of(rank: int, bounds: Sequence[int], lengths: Sequence[int]) -> tuple[slice, Any]:
    """Return a rank's tokens and its context."""
    begin, end = [*pairwise([0, *accumulate(lengths)])][rank]
    context = build_cp_context(torch.tensor(bounds), dist.group.WORLD, 4, lengths=lengths)
    return slice(begin, end), context


def _run(rank: int, case: Case) -> dict[str, Tensor]:
    tokens, context = _slice_of(rank, case.bounds, case.lengths)
    world = dist.get_world_size()
    model: Any = Mixed(case.make())
    rotation: dict[str, Any] = rotation_of(model.layer, tokens)
    x = case.x[:, tokens].clone().requires_grad_()
    loss_scale = 1
    if case.wrapped == "ddp":
        # the adaptive layer does not use f_proj
        model = DistributedDataParallel(model, find_unused_parameters=case.adaptive)
        loss_scale = world  # it takes the mean
    elif case.wrapped == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        loss_scale = world
    elif case.wrapped == "compile":
        model = torch.compile(model, backend="eager")
    if case.wrapped == "checkpoint":
        y = checkpoint(model, x, context, use_reentrant=False, **rotation)
    else:
        y = model(x, context, **rotation)
    (loss_scale * y * case.dy[:, tokens]).sum().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if "f_proj" in name:  # unused in the adaptive layer
            continue
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        elif case.wrapped != "ddp":
            dist.all_reduce(grad)
        short = name.removeprefix("module.").removeprefix("_orig_mod.").removeprefix("layer.")
        grads[short] = grad
    dx: Any = x.grad
    return {"y": y.detach(), "x": dx / loss_scale, **grads}


def run_prefill(
    rank: int,
    x: Tensor,
    lengths: Sequence[int],
    token: Tensor,
    hooked: bool = False,
    adaptive: bool = False,
) -> Tensor | None:
    """Return the output for a token after a row, decoded by the last rank from its cache."""
    tokens, context = _slice_of(rank, [0, x.shape[1]], lengths)
    layer = make_layer(adaptive=adaptive)
    if hooked:
        layer.v_proj.register_forward_hook(lambda module, args, y: 1 * y)
    cache = QuasarCache() if adaptive else None
    given = {"past_key_values": cache, **rotation_of(layer, tokens)}
    with torch.no_grad():
        results = layer(x[:, tokens], cp_context=context, use_cache=True, **given)
        if rank < len(lengths) - 1:
            return None
        cache = cache or results[2]
        after = rotation_of(layer, slice(x.shape[1], x.shape[1] + 1))
        y: Tensor = layer(token, past_key_values=cache, use_cache=True, **after)[0]
        return y


def reset_shards(rank: int, width: int) -> tuple[dict[str, Tensor], set[str]]:
    """Return the parameters of a block that is sharded on the meta device and then reset.

    Also return the names of the parameters with the mark against weight decay.
    """
    torch.manual_seed(rank)  # FSDP2 sends the same seed to all ranks
    with torch.device("meta"):
        model = HybridBlock(width, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
    named: Any = list(model.named_parameters())
    marked = {name for name, p in named if getattr(p, "_no_weight_decay", False)}
    return {name: p.detach().full_tensor() for name, p in named}, marked
