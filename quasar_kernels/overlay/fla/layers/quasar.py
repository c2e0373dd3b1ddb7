"""The QuasarAttention layer: projections, short convolutions, the operator, gated norm, output.

    q, k, v = silu(causal_conv(x W))        o = operator(q, k, v, softplus(beta_log))
    y = (rmsnorm(o per head) * sigmoid(x W_g0 W_g1 + b)) W_o

A call without cached states records one autograd node. Its shapes and QUASAR_KEEP_MIB decide
whether the node saves intermediate results for the backward pass (layer/autograd.py). By default, a
call of a million tokens of 512 channels saves only its input and its weights. A call runs through
its submodules instead if they have hooks, adapters or other classes (layer/wrapped.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla.ops.quasar import torch_private
from fla.ops.quasar.arguments import (
    IGNORED_BY_LAYERS,
    PLAIN,
    expect_epsilon,
    expect_sizes,
    refuse_additive,
    refuse_unknown,
    refuse_wrapper,
)
from fla.ops.quasar.chunk_torch import sequence_lengths
from fla.ops.quasar.device import compute_dtype, on_its_device
from fla.ops.quasar.layer.autograd import record
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.forward import run
from fla.ops.quasar.layer.states import QuasarCache, run_on_rank, run_with_states
from fla.ops.quasar.layer.wrapped import GatedRMSNorm, layer_by_modules, plain_weights
from fla.ops.quasar.parameters import MarkedParameters
from fla.ops.quasar.switches import requested_backend

__all__ = ["GatedRMSNorm", "QuasarAttention", "QuasarCache"]


class QuasarAttention(MarkedParameters):  # type: ignore[misc] # fla has no types here
    """QuasarAttention (arXiv 2512.12602), a drop-in sequence mixer of linear cost.

    Args:
        hidden_size: width of the input and the output.
        head_dim: channels of a head, the same for keys and values.
        num_heads: heads; the projections are `num_heads * head_dim` wide.
        mode: `chunk`, or `fused_recurrent` to process the tokens one by one.
        use_short_conv: whether q, k and v pass a causal depthwise convolution and silu.
        conv_size: taps of the convolution.
        conv_bias: whether the convolutions have a bias.
        layer_idx: place of the layer's states in the cache. Without one, a layer uses the first
            place, which it cannot share with another layer.
        norm_eps: epsilon of the output norm.
        kwargs: `expand_v=1`, `num_v_heads=num_heads` and `allow_neg_eigval=False`, which other
            layers' configurations contain, and any name with the value None.

    Raises:
        ValueError: an unknown mode or argument, a size below 1, or a negative place or epsilon.
    """

    UNDECAYED = ("beta_log",)

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
        only = {"expand_v": (1,), "num_v_heads": (num_heads,), "allow_neg_eigval": (False,)}
        refuse_unknown(type(self), kwargs, only=only)
        expect_sizes(hidden_size=hidden_size, head_dim=head_dim, num_heads=num_heads)
        expect_sizes(conv_size=conv_size)
        expect_epsilon("norm_eps", norm_eps)
        if layer_idx is not None and layer_idx < 0:
            raise ValueError(f"layer_idx must be the layer's place, from 0; got {layer_idx}")
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
        self._add_step_parameters()
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, head_dim, bias=False), nn.Linear(head_dim, width, bias=True)
        )
        self.o_norm = GatedRMSNorm(head_dim, norm_eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def _add_step_parameters(self) -> None:
        """Add the parameters of the step sizes, in which the layers differ."""
        self.beta_log = nn.Parameter(torch.empty(self.num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw beta_log, the only parameter outside of submodules, from log U(1, 16)."""
        wide = torch.promote_types(self.beta_log.dtype, torch.float32)
        self.beta_log.copy_(torch.empty_like(self.beta_log, dtype=wide).uniform_(1, 16).log())

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
            kwargs: `IGNORED_BY_LAYERS`, such as `position_ids`, and any name with the value None.

        Returns:
            (y `[B, T, hidden_size]`, None, the cache). Under autocast y has autocast's dtype.

        Raises:
            ValueError: an unknown argument, such as `seq_idx`; a DTensor or a nested tensor; an
                input or a mask of another shape, or both a mask and `cu_seqlens`; bounds that do
                not rise from 0 to T, or B other than 1 with them; a cache of another number of
                sequences, or with another layer in this layer's place; a cp_context with a mask,
                with a cache, or with `use_cache` and several sequences.
            RuntimeError: the exchange with other ranks failed.
            TypeError: a submodule that is called returns a part of its result, as under tensor
                parallelism, or a result of another shape.
        """
        if kwargs:
            refuse_unknown(self.forward, kwargs, IGNORED_BY_LAYERS)
        if type(hidden_states) not in PLAIN:
            refuse_wrapper("hidden_states", hidden_states)
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states must have shape [B, T, {self.hidden_size}]; got "
                f"{tuple(hidden_states.shape)}"
            )
        x, tokens, rank = hidden_states, None, None
        if cp_context is not None:
            rank = rank_slice(self, x, cp_context, attention_mask, past_key_values, use_cache)
            cu_seqlens = rank.bounds
        elif attention_mask is not None:
            x, cu_seqlens, tokens = without_padding(x, attention_mask, cu_seqlens)
        elif cu_seqlens is not None:
            sequence_lengths(cu_seqlens, *x.shape[:2])  # refuses bounds that do not fit
        backend = requested_backend() if x.is_cuda else "torch"
        shape = self.num_heads, self.head_dim, self.norm_eps
        call = Call(*shape, compute_dtype(x), cu_seqlens, backend, self.mode != "chunk")
        weights, cache = plain_weights(self), past_key_values
        if rank is not None:
            y, cache = run_on_rank(self, call, x, weights, rank, bool(use_cache))
        elif cache is not None or use_cache:
            length = hidden_states.shape[1]
            y, cache = run_with_states(self, call, x, weights, cache, bool(use_cache), length)
        elif weights is None:
            y, _ = layer_by_modules(call, x, self)
        elif torch.is_grad_enabled() or torch_private.forward_ad._current_level >= 0:
            y = record(call, self, x, weights)
        else:
            y = run(call, self, x, weights)
        if tokens is not None:
            B, T, _ = hidden_states.shape
            y = y.new_zeros(B * T, y.shape[-1]).index_copy(0, tokens, y.squeeze(0)).view(B, T, -1)
        return y, None, cache


def rank_slice(
    layer: Any, x: torch.Tensor, context: Any, mask: Any, cache: Any, use_cache: bool | None
) -> Any:
    """Return the `RankSlice` of a layer's call with a cp_context; pass None for an empty cache.

    Raises:
        ValueError: x has several rows, or there is a mask, a cache, or use_cache for several
            sequences.
    """
    from fla.ops.quasar.layer.rank_slice import RankSlice  # imports torch.distributed
    from fla.ops.quasar.parallel.context import expect_one_row

    expect_one_row(x)
    if mask is not None:
        raise ValueError("with a cp_context, leave padding out: pack the sequences")
    if cache is not None or (use_cache and len(context.cu_seqlens_cpu) > 2):
        raise ValueError(
            "with a cp_context, omit past_key_values, and set use_cache only if the slice has "
            f"one sequence; it has {len(context.cu_seqlens_cpu) - 1}"
        )
    return RankSlice(context, x.shape[1], layer.conv_size if layer.use_short_conv else 1)


def without_padding(
    x: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the tokens without padding in one row, their bounds, and their indices in B T tokens.

    x `[B, T, hidden]` without tokens is returned unchanged, without bounds and indices.
    """
    (B, T, _), shape = x.shape, tuple(mask.shape)
    if len(shape) != 2 or shape[0] != B or shape[1] < T or cu_seqlens is not None:
        raise ValueError(
            f"attention_mask must be a padding mask [{B}, at least {T}], and not be "
            f"combined with cu_seqlens; got shape {shape}"
        )
    if not B * T:
        return x, None, None
    refuse_additive(mask)
    mask = mask[:, -T:].bool()
    tokens = mask.flatten().nonzero().squeeze(-1)
    bounds = F.pad(mask.sum(-1).cumsum(0), (1, 0))
    return x.reshape(B * T, -1)[tokens].unsqueeze(0), bounds, tokens


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
