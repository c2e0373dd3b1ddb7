"""Calls of the layer that read or return states or run on a rank's slice, and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fla.ops.quasar import torch_private
from fla.ops.quasar.device import is_recorded
from fla.ops.quasar.layer import paths
from fla.ops.quasar.layer.autograd import record
from fla.ops.quasar.layer.call import Call, States, Weights
from fla.ops.quasar.layer.forward import layer_forward
from fla.ops.quasar.layer.graphs import Inputs, Operation, Tensors, launch_or_replay
from fla.ops.quasar.layer.library import layer_with_states
from fla.ops.quasar.layer.wrapped import autocast_to, layer_by_modules

if TYPE_CHECKING:
    from fla.ops.quasar.layer.rank_slice import RankSlice  # imports torch.distributed

DECODE_TOKENS = 16
"""After a cached state, up to this many tokens are processed one by one."""

_COUNT = len(Weights._fields)


class QuasarCache:
    """States of a model's layers between calls, if the caller has no other cache.

    Decoding without gradients overwrites the states that layers have stored: to continue twice from
    one cache, `copy.copy` it. States that other code stores by `update` are not overwritten.
    """

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self._users: dict[int, int] = {}

    def __copy__(self) -> QuasarCache:
        other = QuasarCache()
        for state in self.states:
            state["owned"] = False  # neither cache may overwrite what both have
        other.states = [*map(dict, self.states)]
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {"states": self.states}  # without `_users`, because a copy has other layers

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.states, self._users = state["states"], {}

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.states[layer_idx]

    def place_of(self, layer: Any) -> int:
        """Return the place of a layer's states.

        Raises:
            ValueError: another layer uses it, and one of the two was constructed without a place.
        """
        index, user = (0, id(layer)) if layer.layer_idx is None else (layer.layer_idx, 0)
        if self._users.setdefault(index, user) != user:
            raise ValueError(
                f"two layers use place {index} of the cache, one of them without layer_idx: "
                "construct every layer with the layer_idx of its place"
            )
        return index

    def update(
        self,
        recurrent_state: torch.Tensor | None,
        conv_state: Sequence[torch.Tensor] | None,
        layer_idx: int,
        offset: int,
        *,
        owned: bool = False,
    ) -> None:
        """Store a layer's states after `offset` more tokens.

        `owned` states may be overwritten: no caller has references to them.
        """
        while len(self.states) <= layer_idx:
            empty = {"recurrent_state": None, "conv_state": None, "seen_tokens": 0, "owned": False}
            self.states.append(empty)
        seen = self.states[layer_idx]["seen_tokens"] + offset
        self.states[layer_idx] = {
            "recurrent_state": recurrent_state,
            "conv_state": conv_state,
            "seen_tokens": seen,
            "owned": owned,
        }


def run_with_states(
    layer: Any,
    call: Call,
    x: torch.Tensor,
    weights: Weights | None,
    cache: Any,
    keep: bool,
    length: int,
) -> tuple[torch.Tensor, Any]:
    """Run from the cached states, if there are any, and store the new ones if `keep`.

    Args:
        layer: the `QuasarAttention`.
        call, x: its call.
        weights: None calls the layer's submodules.
        cache: with `len`, `[layer_idx]` and `update`; None is no state.
        keep: whether to store states, in a new `QuasarCache` if there is no cache.
        length: tokens of a sequence, with padding.

    Returns:
        y, and the cache.

    Raises:
        ValueError: the cache has states of another number of sequences, or it is not a
            `QuasarCache` and the layer has no place, or another layer uses the place.
    """
    cache = QuasarCache() if cache is None else cache
    index = _place_in(cache, layer)
    last = cache[index] if len(cache) > index else None
    parts: Any = None
    state: Any = None
    if last is not None:
        parts, state = last["conv_state"], last["recurrent_state"]
        _check_sequences((state, *(parts or ())), call.sequences(x))
    if state is not None and length <= DECODE_TOKENS:
        call = Call(*call[:-1], recurrent=True)  # `_replace` would take longer
    tracks_owner = type(cache) is QuasarCache
    overwrite = False
    if tracks_owner and last is not None:
        # the backward pass of a recorded call reads the states again
        last["owned"] = last["owned"] and not torch.is_grad_enabled()
        overwrite = keep and last["owned"] and _are_overwritable(parts, state, call.dtype)
    if overwrite and length <= DECODE_TOKENS and call.cu_seqlens is None and weights is not None:
        tensors = (*weights, *(parts or ()), state)
        y: Any = launch_or_replay(layer, DECODE, call, (x,), tensors, call.dtype)[0][0]
        cache.update(state, parts, index, length, owned=True)
        return y, cache
    conv = None
    if layer.use_short_conv:
        if parts is None:
            sequences, width = call.sequences(x), 3 * call.heads * call.head_dim
            conv = x.new_zeros(sequences, width, layer.conv_size).to(call.dtype)
        else:
            conv = torch.cat([part.to(call.dtype) for part in parts], dim=1)
    before = States(conv, state)
    if weights is None:
        y, after = layer_by_modules(call, x, layer, before, keep, overwrite)
    else:
        y, after = layer_with_states(call, x, weights, before, keep, overwrite)
    if keep:
        recorded = any(x is not None and x.requires_grad for x in after)
        owned = {"owned": not recorded} if tracks_owner else {}
        # separate and contiguous, because decoding overwrites them
        split = None if after.conv is None else after.conv.unflatten(1, (3, -1)).transpose(0, 1)
        parts = None if split is None else tuple(split.contiguous())
        cache.update(
            recurrent_state=after.operator,
            conv_state=parts,
            layer_idx=index,
            offset=length,
            **owned,
        )
    return y, cache


def _place_in(cache: Any, layer: Any) -> int:
    if isinstance(cache, QuasarCache):
        return cache.place_of(layer)
    if layer.layer_idx is None:
        raise ValueError("with this cache, the layer needs its place: construct it with layer_idx")
    place: int = layer.layer_idx
    return place


def _check_sequences(states: Sequence[torch.Tensor | None], sequences: int) -> None:
    for state in states:
        if state is not None and state.shape[0] != sequences:
            raise ValueError(
                f"the cache holds states of {state.shape[0]} sequences, and this call has "
                f"{sequences}: pass a new cache, or select or repeat the cached states"
            )


def run_on_rank(
    layer: Any, call: Call, x: torch.Tensor, weights: Weights | None, rank: RankSlice, keep: bool
) -> tuple[torch.Tensor, QuasarCache | None]:
    """Run on this rank's slice of packed sequences, x `[1, T, hidden_size]`."""
    if weights is not None and paths.supports_kernels(call, x, weights):
        if is_recorded(x, *weights):
            y = record(call, layer, x, weights, rank)
        else:
            rank.halo = rank.gather_halo(x)
            with torch.no_grad():  # `paths.choose` has no fused kernels while autograd records
                y = layer_forward(call, x, weights, rank=rank).y
    else:
        rank.exchange_halo(x)
        if weights is None:
            y, _ = layer_by_modules(call, x, layer, rank=rank)
        else:
            y, _ = layer_with_states(call, x, weights, rank=rank)
    if not keep:
        return y, None
    cache, parts = QuasarCache(), None
    if layer.use_short_conv:
        rows = torch.cat([rank.halo, x[0, -layer.conv_size :]])[-layer.conv_size :].detach()
        parts = _conv_inputs(layer, call, weights, rows)
    cache.update(rank.final, parts, layer.layer_idx or 0, x.shape[1])
    return y, cache


def _conv_inputs(
    layer: Any, call: Call, weights: Weights | None, rows: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the convolution states of q, k and v, each `[1, H S, taps]`, after a sequence.

    `rows` `[n, hidden]` are the sequence's last inputs, n at most the number of taps.
    """
    rows = F.pad(rows, (0, 0, layer.conv_size - rows.shape[0], 0))
    if weights is None:
        with torch.no_grad(), autocast_to(rows, call.dtype):
            parts = [project(rows) for project in (layer.q_proj, layer.k_proj, layer.v_proj)]
    else:
        rows = rows.to(call.dtype)
        parts = [F.linear(rows, w.detach().to(call.dtype)) for w in weights[:3]]
    return tuple(part.mT.unsqueeze(0).contiguous() for part in parts)


def _decode(call: Call, inputs: Inputs, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Process a few tokens; overwrite the states, the last of `tensors`."""
    weights: Any = Weights(*tensors[:_COUNT])
    *parts, state = tensors[_COUNT:]
    before = States(torch.cat(parts, dim=1) if parts else None, state)
    y, after = layer_with_states(call, inputs[0], weights, before, keep=True, overwrite=True)
    if parts and after.conv is not None:
        torch_private.copy_all(parts, after.conv.chunk(3, dim=1))
    return [y], ()


DECODE = Operation(_decode, lambda *_: None, lambda call, inputs, tensors: [call.dtype])
"""A call of a few tokens that overwrites its states. The tensors are the weights and the states."""


def _are_overwritable(
    parts: Sequence[torch.Tensor] | None, state: torch.Tensor | None, dtype: torch.dtype
) -> bool:
    """Return whether a call in `dtype` can overwrite `state` and the convolution's states."""
    if state is None or (parts and parts[0].dtype != dtype):
        return False
    if not all(x.is_contiguous() for x in (state, *(parts or ()))):  # `expand` repeats elements
        return False
    return torch.is_inference_mode_enabled() or not state.is_inference()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
