"""The QuasarAttention layer: projections, short convolutions, the operator, gated norm, output.

    q, k, v = silu(causal_conv(x W))        o = operator(q, k, v, softplus(beta_log))
    y = (rmsnorm(o per head) * sigmoid(x W_g0 W_g1 + b)) W_o

A call without cached states records one autograd node. Its shapes and QUASAR_KEEP_MIB decide
whether the node saves intermediate results for the backward pass (layer/node.py). By default, a
call of a million tokens saves only its input and its weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla.ops.quasar import chunk_quasar, fused_recurrent_quasar, torch_private
from fla.ops.quasar.chunk_torch import sequence_lengths
from fla.ops.quasar.device import on_its_device
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.forward import run_layer, takes
from fla.ops.quasar.layer.kernels import causal_conv_silu, recomputed
from fla.ops.quasar.layer.library import gated, positions, project
from fla.ops.quasar.layer.node import record_layer
from fla.ops.quasar.layer.products import concatenate_weights
from fla.ops.quasar.layer.replay import Tensors, replayed
from fla.ops.quasar.switches import requested_backend

DECODE_TOKENS = 16
"""Maximum number of tokens after a cached state to process one by one."""

_CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")


class GatedRMSNorm(nn.Module):
    """Holds the norm's weight `[head_dim]`; the layer applies it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class QuasarCache:
    """States of a model's layers between calls, if the caller has no other cache.

    Decoding without gradients overwrites the states that layers have stored: to continue twice from
    one cache, `copy.deepcopy` it. States that other code stores by `update` are not overwritten.
    """

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.states[layer_idx]

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


class QuasarAttention(nn.Module):
    """QuasarAttention (arXiv 2512.12602), a drop-in sequence mixer of linear cost.

    Args:
        hidden_size: width of the input and the output.
        head_dim: channels of a head, the same for keys and values.
        num_heads: heads; the projections are `num_heads * head_dim` wide.
        mode: `chunk`, or `fused_recurrent` to process the tokens one by one.
        use_short_conv: whether q, k and v pass a causal depthwise convolution and silu.
        conv_size: taps of the convolution.
        conv_bias: whether the convolutions have a bias.
        layer_idx: place of the layer's states in the cache.
        norm_eps: epsilon of the output norm.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        head_dim: int = 128,
        num_heads: int = 16,
        mode: str = "chunk",
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if mode not in ("chunk", "fused_recurrent"):
            raise ValueError(f"mode must be 'chunk' or 'fused_recurrent'; got {mode!r}")
        self.mode = mode
        self.hidden_size = hidden_size
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.key_dim = self.value_dim = num_heads * head_dim
        self.use_short_conv = use_short_conv
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.layer_idx = layer_idx
        self.norm_eps = norm_eps

        width = self.key_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        if use_short_conv:
            conv: dict[str, Any] = {"kernel_size": conv_size, "groups": width, "bias": conv_bias}
            self.q_conv1d = nn.Conv1d(width, width, **conv)
            self.k_conv1d = nn.Conv1d(width, width, **conv)
            self.v_conv1d = nn.Conv1d(width, width, **conv)
        self.beta_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.beta_log._no_weight_decay = True  # type: ignore[attr-defined] # for optimizers
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, head_dim, bias=False), nn.Linear(head_dim, width, bias=True)
        )
        self.o_norm = GatedRMSNorm(head_dim)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    @torch.compiler.disable  # torch.compile can trace neither the kernels nor the CUDA graphs
    @on_its_device
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: torch.Tensor | None = None,
        cp_context: Any | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Any | None]:
        """Mix the tokens of each sequence.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: `[B, at least T]`, zero for padding; the last T columns count. Padded
                tokens change no state, and their output is zero.
            past_key_values: a cache with `len`, `[layer_idx]` and `update`, or None.
            use_cache: whether to store the states for the next call, in a new `QuasarCache` if
                past_key_values is None.
            output_attentions: ignored: there are no attention maps.
            cu_seqlens: `[N + 1]` bounds of sequences packed in one row (B = 1).
            cp_context: from `build_cp_context`. hidden_states is then this rank's slice of packed
                sequences, and the context's bounds replace cu_seqlens. All ranks must call. With
                `use_cache` the slice must have one sequence; to decode its next tokens, use the
                cache that the sequence's last rank returns. The gradients of the parameters are
                those of the slice: sum them over the ranks.

        Returns:
            (y `[B, T, hidden_size]`, None, the cache). Under autocast y has autocast's dtype.

        Raises:
            ValueError: an input or a mask of another shape, or both a mask and `cu_seqlens`; bounds
                that do not rise from 0 to T, or B other than 1 with them; a cp_context with a mask,
                with a cache, or with `use_cache` and several sequences.
            RuntimeError: the exchange with other ranks failed.
            TypeError: FSDP2 or tensor parallelism shards a single projection of the layer.
        """
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states must have shape [B, T, {self.hidden_size}]; got "
                f"{tuple(hidden_states.shape)}"
            )
        B, T, _ = hidden_states.shape
        x, tokens = hidden_states, None
        if cp_context is not None:
            if attention_mask is not None:
                raise ValueError("with a cp_context, leave padding out: pack the sequences")
            y, cache = self._mix_parallel(x, cp_context, past_key_values, bool(use_cache))
            return y, None, cache
        if attention_mask is not None:
            shape = tuple(attention_mask.shape)
            if len(shape) != 2 or shape[0] != B or shape[1] < T or cu_seqlens is not None:
                raise ValueError(
                    f"attention_mask must be a padding mask [{B}, at least {T}], and not be "
                    f"combined with cu_seqlens; got shape {shape}"
                )
            if B * T:
                mask = attention_mask[:, -T:].bool()
                tokens = mask.flatten().nonzero().squeeze(-1)  # without padding
                cu_seqlens = F.pad(mask.sum(-1).cumsum(0), (1, 0))
                x = x.reshape(B * T, -1)[tokens].unsqueeze(0)
        elif cu_seqlens is not None:
            sequence_lengths(cu_seqlens, B, T)  # refuses bounds that do not fit

        if past_key_values is None and not use_cache:
            y = self._mix(x, cu_seqlens)
        else:
            if past_key_values is None:
                past_key_values = QuasarCache()
            y = self._mix_cached(x, cu_seqlens, past_key_values, bool(use_cache), T)
        if tokens is not None:
            y = y.new_zeros(B * T, y.shape[-1]).index_copy(0, tokens, y.squeeze(0)).view(B, T, -1)
        return y, None, past_key_values

    def _mix(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """Run without states, as one node of autograd."""
        dtype, weights = _compute_dtype(x), self._weights()
        backend = requested_backend() if x.is_cuda else "torch"
        call = Call(self.num_heads, self.head_dim, self.norm_eps, dtype, cu_seqlens, backend)
        if self.mode == "chunk" and takes(call, x, weights):
            run = record_layer if torch.is_grad_enabled() else run_layer
            return run(call, self, x, weights)
        if torch.is_grad_enabled():
            return recomputed(functools.partial(self._mix_in_steps, call), x, *weights)
        return self._mix_in_steps(call, x, *weights)

    def _mix_parallel(
        self, x: torch.Tensor, context: Any, cache: Any, keep: bool
    ) -> tuple[torch.Tensor, Any]:
        """Run on this rank's slice of packed sequences, x `[1, T, hidden_size]`."""
        from fla.ops.quasar.layer.parallel import HaloFunction, Neighbours, ParallelLayer

        if cache is not None or (keep and len(context.cu_seqlens_cpu) > 2):
            raise ValueError(
                "with a cp_context, omit past_key_values, and set use_cache only if the slice has "
                f"one sequence; it has {len(context.cu_seqlens_cpu) - 1}"
            )
        dtype, weights = _compute_dtype(x), self._weights()
        taps = self.conv_size if self.use_short_conv else 1
        neighbours = Neighbours(context, x.shape[1], taps)
        bounds = context.cu_seqlens_cpu if len(context.cu_seqlens_cpu) > 2 else None
        backend = requested_backend() if x.is_cuda else "torch"
        call = Call(self.num_heads, self.head_dim, self.norm_eps, dtype, bounds, backend)
        if takes(call, x, weights):
            y, halo = ParallelLayer.apply(call, neighbours, x, *weights), neighbours.halo
        else:
            halo = HaloFunction.apply(neighbours, x)
            across = neighbours, context
            y, *_ = self._forward_with_states(x, weights, dtype, bounds, halo=halo, across=across)
        if not keep:
            return y, None
        cache = QuasarCache()
        rows = torch.cat([halo, x[0, -taps:]])[-taps:]
        parts = self._conv_inputs(rows, weights, dtype) if self.use_short_conv else None
        cache.update(neighbours.final, parts, self.layer_idx or 0, x.shape[1])
        return y, cache

    def _conv_inputs(
        self, rows: torch.Tensor, weights: Weights, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Return the convolution states of q, k and v, each `[1, H S, taps]`, after a sequence.

        `rows` `[n, hidden]` are the sequence's last inputs, n at most the number of taps.
        """
        rows = F.pad(rows.detach().to(dtype), (0, 0, self.conv_size - rows.shape[0], 0))
        states = (F.linear(rows, w.detach().to(dtype)).mT for w in weights[:3])
        return tuple(state.unsqueeze(0).contiguous() for state in states)

    def _mix_in_steps(self, call: Call, x: torch.Tensor, *weights: Any) -> Any:
        """Run a call that the layer's kernels do not support."""

        def compute(x: torch.Tensor, *tensors: Any) -> tuple[Tensors, Tensors]:
            y, *_ = self._forward_with_states(x, Weights(*tensors), call.dtype, call.cu_seqlens)
            return [y], ()

        owner = self if call.cu_seqlens is None else None
        settings = (call.backend, *self._settings())
        (y,), _ = replayed(owner, compute, (x,), weights, call.dtype, settings)
        return y

    def _mix_cached(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        cache: Any,
        keep: bool,
        length: int,
    ) -> torch.Tensor:
        """Run from the cached states, if there are any, and store the new ones if `keep`."""
        index, dtype = self.layer_idx or 0, _compute_dtype(x)
        last = cache[index] if len(cache) > index else None
        B = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        parts: Any = None
        state: Any = None
        if last is not None:
            parts, state = last["conv_state"], last["recurrent_state"]
        recurrent = state is not None and length <= DECODE_TOKENS
        tracks_owner = type(cache) is QuasarCache
        overwrite = False
        if tracks_owner and last is not None:
            # the backward pass of a recorded call reads the states again
            last["owned"] = last["owned"] and not torch.is_grad_enabled()
            overwrite = keep and last["owned"] and _are_overwritable(parts, state, dtype)
        if overwrite and recurrent and cu_seqlens is None:
            y = self._decode(x, parts, state, dtype)
            cache.update(state, parts, index, length, owned=True)
            return y
        conv_state = None
        if self.use_short_conv:
            if parts is None:
                conv_state = x.new_zeros(B, 3 * self.key_dim, self.conv_size).to(dtype)
            else:
                conv_state = torch.cat([part.to(dtype) for part in parts], dim=1)
        y, conv_state, state = self._forward_with_states(
            x, self._weights(), dtype, cu_seqlens, conv_state, state, keep, recurrent, overwrite
        )
        if keep:
            parts = None
            if conv_state is not None:
                # separate contiguous states of q, k and v, because decoding overwrites them
                parts = tuple(conv_state.unflatten(1, (3, -1)).transpose(0, 1).contiguous())
            owned = {"owned": not state.requires_grad} if tracks_owner else {}
            cache.update(
                recurrent_state=state, conv_state=parts, layer_idx=index, offset=length, **owned
            )
        return y

    def _decode(
        self,
        x: torch.Tensor,
        parts: Sequence[torch.Tensor] | None,
        state: torch.Tensor,
        dtype: torch.dtype,
    ) -> Any:
        """Process a few tokens by a CUDA graph; overwrite `state` and the convolution's `parts`."""
        weights = self._weights()
        count = len(weights)

        def step(x: torch.Tensor, *tensors: Any) -> tuple[Tensors, Tensors]:
            weights = Weights(*tensors[:count])
            parts, state = tensors[count:-1], tensors[-1]
            conv_state = torch.cat(parts, dim=1) if parts else None
            y, conv_state, _ = self._forward_with_states(
                x, weights, dtype, None, conv_state, state, True, recurrent=True, overwrite=True
            )
            if parts:
                torch_private.copy_all(parts, conv_state.split(self.key_dim, dim=1))
            return [y], ()

        tensors = (*weights, *(parts or ()), state)
        (y,), _ = replayed(self, step, (x,), tensors, dtype, ("decode", *self._settings()))
        return y

    def _settings(self) -> tuple[Any, ...]:
        """Return the settings on which a graph depends."""
        return self.hidden_size, self.head_dim, self.num_heads, self.mode, self.norm_eps

    def _weights(self) -> Weights:
        """Return the parameters.

        They are read from the modules' dictionaries, because `nn.Module.__getattr__` would take a
        considerable share of the host time of a call with 512 tokens.

        Raises:
            TypeError: FSDP2 or tensor parallelism shards a single projection of the layer.
        """
        parts: dict[str, Any] = self._modules
        narrow, wide = parts["g_proj"]._modules.values()
        try:
            q, wide = parts["q_proj"]._parameters["weight"], wide._parameters
            taps: Sequence[Any] = (None, None, None)
            shifts = taps
            if self.use_short_conv:
                convs = [parts[name]._parameters for name in _CONVS]
                taps, shifts = [p["weight"] for p in convs], [p["bias"] for p in convs]
            weights = Weights(
                q,
                parts["k_proj"]._parameters["weight"],
                parts["v_proj"]._parameters["weight"],
                narrow._parameters["weight"],
                wide["weight"],
                wide["bias"],
                *taps,
                *shifts,
                self._parameters["beta_log"],
                parts["o_norm"]._parameters["weight"],
                parts["o_proj"]._parameters["weight"],
            )
        except KeyError:  # in a parametrized module, the weight is an attribute, not a parameter
            weights = self._weights_by_attribute()
        if type(weights.q) is not nn.Parameter and hasattr(weights.q, "placements"):
            raise TypeError(  # kernels read plain memory
                "q_proj.weight is a DTensor while the layer runs: give fully_shard the layer or "
                "the block around it, not its projections, and use no tensor parallelism for them"
            )
        return weights

    def _weights_by_attribute(self) -> Weights:
        narrow, wide = self.g_proj
        convs = [getattr(self, name) for name in _CONVS] if self.use_short_conv else []
        return Weights(
            self.q_proj.weight,
            self.k_proj.weight,
            self.v_proj.weight,
            narrow.weight,
            wide.weight,
            wide.bias,
            *([conv.weight for conv in convs] or (None,) * 3),
            *([conv.bias for conv in convs] or (None,) * 3),
            self.beta_log,
            self.o_norm.weight,
            self.o_proj.weight,
        )

    def _forward_with_states(
        self,
        x: torch.Tensor,
        weights: Weights,
        dtype: torch.dtype,
        cu_seqlens: torch.Tensor | None,
        conv_state: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        keep: bool = False,
        recurrent: bool = False,
        overwrite: bool = False,
        halo: torch.Tensor | None = None,
        across: Any = None,
    ) -> tuple[torch.Tensor, Any, Any]:
        """Compute y, and the states after x; all matrix products in `dtype`.

        Args:
            conv_state, state: the states before x; None is zero.
            keep: whether to return the operator's state; the convolution's is returned if there was
                one before x.
            recurrent: whether the operator processes one token after the other.
            overwrite: whether the recurrent operator writes the new state to `state`'s storage.
            halo: `[rows, hidden]`, the inputs before x if x is a rank's slice.
            across: the `Neighbours` and the context of that slice.
        """
        extra = 0 if halo is None else halo.shape[0]
        if halo is not None:
            x = torch.cat([halo.unsqueeze(0), x], 1)
            cu_seqlens = cu_seqlens if cu_seqlens is None else F.pad(cu_seqlens[1:] + extra, (1, 0))
        B, T, _ = x.shape
        with torch.autocast(x.device.type, enabled=False):
            # one cast and one product for q, k, v and the gate's narrow half; rows are 2-D, so that
            # the gate's product adds its bias
            projections, *gate_weights, out_weight = concatenate_weights(weights, dtype)
            multiply = project if self.use_short_conv and conv_state is None else F.linear
            mixed = multiply(x.reshape(B * T, self.hidden_size).to(dtype), projections)
            qkv, narrow = mixed.split([3 * self.key_dim, self.head_dim], dim=-1)
            # a copy, so that `mixed`, gigabytes for a million tokens, can be freed
            narrow = narrow.to(dtype).contiguous()
            if self.use_short_conv:
                taps, bias = weights.joined_taps()
                qkv = qkv.view(B, T, 3 * self.key_dim)
                qkv, conv_state = _convolve(qkv, taps, bias, cu_seqlens, conv_state, dtype)
            del mixed
            if extra:
                T, qkv, narrow = T - extra, qkv.view(B, T, -1)[:, extra:], narrow[extra:]
            q, k, v = qkv.reshape(B, T, 3, self.num_heads, self.head_dim).unbind(2)
            beta_log = weights.beta_log
            beta = F.softplus(beta_log if dtype == torch.float64 else beta_log.float())
            if across is not None:
                o, across[0].final = chunk_quasar(
                    q, k, v, beta, output_final_state=True, cp_context=across[1]
                )
            elif recurrent or self.mode != "chunk":
                o, state = fused_recurrent_quasar(
                    q, k, v, beta, state, keep, cu_seqlens, inplace_state=overwrite
                )
            else:
                o, state = chunk_quasar(q, k, v, beta, state, keep, cu_seqlens)
            del q, k, v, qkv
            o = gated(o, narrow, gate_weights, weights.norm, self.norm_eps)
            y = F.linear(o.view(B * T, self.value_dim), out_weight)
        return y.view(B, T, self.hidden_size), conv_state, state


def _are_overwritable(
    parts: Sequence[torch.Tensor] | None, state: torch.Tensor | None, dtype: torch.dtype
) -> bool:
    """Return whether a call in `dtype` can overwrite `state` and the convolution's states."""
    if state is None or (parts and parts[0].dtype != dtype):
        return False
    return torch.is_inference_mode_enabled() or not state.is_inference()


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's if it is on, otherwise x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _convolve(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    state: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return silu of the convolved x `[B, T, C]`, and the new state.

    `state` `[N, C, W]` holds the inputs before each sequence. If it is None, the sequences start
    from zeros and the new state is None.
    """
    B, T, C = x.shape
    if state is None:
        position = positions(B, T, cu_seqlens, x.device)
        y = causal_conv_silu(x.reshape(B * T, C), taps, bias, position, dtype)
        return y.view(B, T, C), None
    if cu_seqlens is not None:
        parts = x.split(sequence_lengths(cu_seqlens, B, T), dim=1)
        results: list[tuple[torch.Tensor, Any]] = [
            _convolve(part, taps, bias, None, before, dtype)
            for part, before in zip(parts, state.split(1), strict=True)
        ]
        return torch.cat([y for y, _ in results], dim=1), torch.cat([s for _, s in results])
    W = state.shape[-1]
    x = torch.cat([state.mT.to(x.dtype), x], dim=1)
    y, _ = _convolve(x, taps, bias, None, None, dtype)
    return y[:, W:], x[:, -W:].mT.contiguous()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
