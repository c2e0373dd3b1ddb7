"""Layers with changed submodules: with hooks, adapters, quantised weights or other classes.

The kernels read plain weights and call no submodule. `plain_weights` checks at each call whether
the submodules would compute the same. If not, `layer_by_modules` calls them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla.ops.quasar import torch_private
from fla.ops.quasar.chunk_torch import sequence_lengths
from fla.ops.quasar.layer.call import NO_STATES, Call, States, Weights
from fla.ops.quasar.layer.kernels import gated_rmsnorm
from fla.ops.quasar.layer.library import operate

if TYPE_CHECKING:
    from fla.ops.quasar.layer.rank_slice import RankSlice  # imports torch.distributed


class GatedRMSNorm(nn.Module):
    """Normalises each head and multiplies it by a gate.

    The layer reads only its weight `[head_dim]`, unless it has to call the module.
    """

    eps = 1e-5

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return rmsnorm(x) * weight * sigmoid(gate), for x and gate `[..., head_dim]`."""
        rows = (t.reshape(-1, t.shape[-1]) for t in (x, gate))
        return gated_rmsnorm(*rows, self.weight, self.eps).view(x.shape)


_LAYER = (nn.Sequential, *(nn.Linear,) * 6, GatedRMSNorm)
_TYPES = {_LAYER, (*_LAYER, *(nn.Conv1d,) * 3)}
"""The types of the modules that `plain_weights` inspects, in its order."""
_NONE = {type(None)}
_parameters = operator.attrgetter("_parameters")
_PLAIN = {nn.Parameter, torch.Tensor, type(None)}


def plain_weights(layer: Any, decays: str = "beta_log") -> Weights | None:
    """Return the layer's weights, or None if a call must run its submodules.

    `decays` is the name of the parameter that becomes `Weights.beta_log`.

    It returns None if a submodule has a hook, another class, an instance attribute `forward`, or a
    weight that is not a plain tensor. The modules' dictionaries are read directly, because
    `nn.Module.__getattr__` would take a considerable share of the host time of a call with 512
    tokens.
    """
    parts = layer._modules
    gate = parts["g_proj"]
    modules = (
        gate,
        parts["q_proj"],
        parts["k_proj"],
        parts["v_proj"],
        *gate._modules.values(),
        parts["o_proj"],
        parts["o_norm"],
    )
    if layer.use_short_conv:
        modules += parts["q_conv1d"], parts["k_conv1d"], parts["v_conv1d"]
    if tuple(map(type, modules)) not in _TYPES:
        return None
    for module in modules:
        state = module.__dict__
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
        ):
            return None
    _, q, k, v, down, up, out, norm, *convs = map(_parameters, modules)
    try:
        taps: Any = (None, None, None)
        shifts = taps
        if convs:
            first, second, third = convs
            taps = first["weight"], second["weight"], third["weight"]
            shifts = first["bias"], second["bias"], third["bias"]
        beta_log = layer._parameters.get(decays)
        weights = Weights(
            *(q["weight"], k["weight"], v["weight"], down["weight"]),
            *(up["weight"], up["bias"], *taps, *shifts),
            getattr(layer, decays) if beta_log is None else beta_log,
            *(norm["weight"], out["weight"]),
        )
    except KeyError:  # another tensor or a property took a parameter's place
        return None
    biases = q["bias"], k["bias"], v["bias"], down["bias"], out["bias"]
    if weights.gate_bias is None or not _NONE.issuperset(map(type, biases)):
        return None
    return weights if _PLAIN.issuperset(map(type, weights)) else None


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module has one of these types, plain weights, no hooks, no own `forward`."""
    state = module.__dict__
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return (
        type(module) in kinds
        and not any(state[name] for name in hooks)
        and "forward" not in state
        and _PLAIN.issuperset(map(type, module._parameters.values()))
    )


def layer_by_modules(
    call: Call,
    x: torch.Tensor,
    layer: Any,
    before: States = NO_STATES,
    keep: bool = False,
    overwrite: bool = False,
    rank: RankSlice | None = None,
) -> tuple[torch.Tensor, States]:
    """Compute the same as `library.layer_with_states` by calling the layer's submodules.

    Autograd records each step. Products are in the call's dtype, as by autocast.

    Raises:
        TypeError: a submodule returns a tensor of another kind or shape, for example a part of it
            under tensor parallelism.
    """
    x, bounds, extra = (x, call.cu_seqlens, 0) if rank is None else rank.with_halo(x)
    heads, width = (call.heads, call.head_dim), call.heads * call.head_dim
    with autocast_to(x, call.dtype):
        qkv = [_checked(layer, f"{name}_proj", x, width).to(call.dtype) for name in "qkv"]
        conv = before.conv
        if layer.use_short_conv:
            states = (None,) * 3 if conv is None else conv.chunk(3, 1)
            mixed = [
                convolve_module(layer, f"{name}_conv1d", part, bounds, state)
                for name, part, state in zip("qkv", qkv, states, strict=True)
            ]
            qkv = [y for y, _ in mixed]
            if conv is not None:
                conv = torch.cat([end for _, end in mixed if end is not None], 1)
        q, k, v = (part[:, extra:].unflatten(-1, heads) for part in qkv)
        gate = _checked(layer, "g_proj", x[:, extra:], width).unflatten(-1, heads)
        with torch_private.no_autocast():
            beta_log, state = layer.beta_log, before.operator
            o, state = operate(call, q, k, v, beta_log, state, keep, overwrite, rank)
        y = _checked(layer, "o_proj", layer.o_norm(o, gate).flatten(-2), layer.hidden_size)
    return y, States(conv, state)


def autocast_to(x: torch.Tensor, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which modules compute in `dtype`, autocast's or x's."""
    if dtype.itemsize == 2:
        return torch.autocast(x.device.type, dtype)
    return contextlib.nullcontext()


def _checked(layer: Any, name: str, x: torch.Tensor, width: int) -> torch.Tensor:
    """Return a submodule's result `[..., width]` for x `[..., inputs]`."""
    y: torch.Tensor = getattr(layer, name)(x)
    if hasattr(y, "placements") or y.shape != (*x.shape[:-1], width):
        raise TypeError(
            f"{name} must return a plain tensor of shape {(*x.shape[:-1], width)}; got a "
            f"{type(y).__name__} of {tuple(y.shape)}: give tensor parallelism whole layers"
        )
    return y


def convolve_module(
    layer: Any, name: str, x: torch.Tensor, bounds: torch.Tensor | None, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return silu of the convolved x `[B, T, C]`, and the new state; arguments as `convolve`.

    The module is called once, with the earlier inputs of each sequence before its tokens.
    """
    B, T, C = x.shape
    if not B * T:
        return x, state
    reach = layer.conv_size - 1
    lengths = [T] if bounds is None else sequence_lengths(bounds, B, T)
    rows = x.mT
    if state is None:
        starts = [rows.new_zeros(B, C, reach + 1)] * len(lengths)
    else:
        starts = [*state.to(rows.dtype).split(B)]
    parts = [torch.cat(pair, -1) for pair in zip(starts, rows.split(lengths, -1), strict=True)]
    y = convolve_by(getattr(layer, name), [part[..., 1:] for part in parts], reach)
    end = None if state is None else torch.cat([part[..., -reach - 1 :] for part in parts])
    return y.mT.to(x.dtype), end


def convolve_by(module: Any, parts: Sequence[torch.Tensor], reach: int) -> torch.Tensor:
    """Return silu of the causal convolution of several sequences, by one call of a module.

    Args:
        module: convolves `[B, C, n]` without padding to `[B, C, n - reach]`.
        parts: for each sequence the `reach` inputs before it and its own, `[B, C, reach + n]`.

    Returns:
        `[B, C, the sum of all n]`.

    Raises:
        TypeError: the module returns another shape.
    """
    inputs = torch.cat(list(parts), -1)
    lengths = [part.shape[-1] - reach for part in parts]
    if not any(lengths):
        return inputs[..., :0]
    y: torch.Tensor = module(inputs)
    expected = (*inputs.shape[:2], inputs.shape[-1] - reach)
    if y.shape != expected:
        raise TypeError(
            f"a convolution must return {expected} for an input of {tuple(inputs.shape)}, without "
            f"padding; {type(module).__name__} returned {tuple(y.shape)}"
        )
    pieces = y.split([n for length in lengths for n in (length, reach)][:-1], -1)[::2]
    return F.silu(torch.cat(pieces, -1))


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
