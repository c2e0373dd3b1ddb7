"""The QuasarAttention layer of public Quasar models since spring 2026: step sizes from the input.

    q, k, v = silu(causal_conv(x W))        q, k = unit(rotated(q)), unit(rotated(k))
    step = step_size(sigmoid(x W_b), A_log, dt_bias)    (layer/operator_inputs.py)
    o = delta_rule(q, k, v, step) / sqrt(head_dim)
    y = (rmsnorm(o per head) * sigmoid(x W_g0 W_g1 + b)) W_o

Names and shapes of the parameters are those of the public layer, so checkpoints load in both
directions. Gradients are those of this formula; the public backward pass uses another formula for
the step sizes, and gives none for A_log and dt_bias.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from fla.layers.quasar import QuasarAttention, rank_slice, without_padding
from fla.ops.quasar import torch_private
from fla.ops.quasar.arguments import IGNORED_BY_LAYERS, PLAIN, refuse_unknown, refuse_wrapper
from fla.ops.quasar.chunk_torch import sequence_lengths
from fla.ops.quasar.device import compute_dtype, on_its_device
from fla.ops.quasar.layer.adaptive import run_adaptive, supports_kernels
from fla.ops.quasar.layer.adaptive_decode import decode
from fla.ops.quasar.layer.adaptive_modules import mix_by_modules
from fla.ops.quasar.layer.adaptive_training import record_adaptive
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.first_step import AdaptiveWeights
from fla.ops.quasar.layer.operator_inputs import Rotation
from fla.ops.quasar.layer.states import DECODE_TOKENS
from fla.ops.quasar.layer.wrapped import is_plain, plain_weights
from fla.ops.quasar.parameters import set_values
from fla.ops.quasar.switches import requested_backend

if TYPE_CHECKING:
    from fla.ops.quasar.layer.rank_slice import RankSlice  # imports torch.distributed


class AdaptiveQuasarAttention(QuasarAttention):  # type: ignore[misc] # fla has no types here
    """QuasarAttention with a step size for each token and head.

    The arguments are those of `QuasarAttention`, with two differences: `mode` is accepted as in the
    public layer, which always uses chunks, and a cache requires `layer_idx`.
    """

    UNDECAYED = ("A_log", "dt_bias")

    # help() and errors name the arguments; mypy supports only plain constructors
    @functools.wraps(QuasarAttention.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reset_parameters()

    def _add_step_parameters(self) -> None:
        self.b_proj = nn.Linear(self.hidden_size, self.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.key_dim, dtype=torch.float32))
        # unused, but in the public layer's checkpoints
        self.f_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)

    def reset_parameters(self) -> None:
        """Initialise A_log as log U(1, 16) and dt_bias as zeros, as the public layer does."""
        device = self.A_log.device
        set_values(self.A_log, torch.empty(self.num_heads, device=device).uniform_(1, 16).log())
        set_values(self.dt_bias, torch.zeros(self.key_dim, device=device))

    @torch.compiler.disable  # torch.compile cannot trace the kernels
    @on_its_device
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        *,
        cu_seqlens: torch.Tensor | None = None,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        cp_context: Any | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Mix the tokens of each sequence.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: `[B, at least T]`, zero for padding; the last T columns count. Padded
                tokens change no state, and their output is zero.
            past_key_values: a cache with `recurrent_states`, `conv_states` and
                `update_quasar_state`, or one of fla's with `len`, `[layer_idx]` and `update`.
            use_cache: whether to store the states in `past_key_values`.
            output_attentions: ignored: there are no attention maps.
            cu_seqlens: `[N + 1]` bounds of sequences packed in one row (B = 1).
            cos, sin: `[1 or B, 1, T, R]` of a rotary embedding by halves of the first R channels
                of q and k; packed tokens use the rows of their places in the row. They get no
                gradients.
            cp_context: as in `QuasarAttention.forward`. cos and sin are those of the slice's
                tokens. With `use_cache`, an empty `past_key_values` receives the states.
            kwargs: `IGNORED_BY_LAYERS`, such as `position_ids` (positions enter through cos and
                sin), and any name with the value None.

        Returns:
            (y `[B, T, hidden_size]`, None). Under autocast y has autocast's dtype.

        Raises:
            ValueError: an unknown argument; an input, a mask or a table of another shape; both a
                mask and `cu_seqlens`; bounds that do not rise from 0 to T; a cache without
                `layer_idx`, or of another batch size; a cp_context with a mask, with a cache that
                has states, or with `use_cache` and several sequences.
            RuntimeError: the exchange with other ranks failed.
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
        B, T, _ = hidden_states.shape
        x, tokens, rank = hidden_states, None, None
        keep = bool(use_cache) and past_key_values is not None
        if cp_context is not None:
            parts, state = self._cached(past_key_values, 1)
            cache = None if parts is state is None else past_key_values
            rank = rank_slice(self, x, cp_context, attention_mask, cache, keep)
            cu_seqlens = rank.bounds
        elif attention_mask is not None:
            x, cu_seqlens, tokens = without_padding(x, attention_mask, cu_seqlens)
        elif cu_seqlens is not None:
            sequence_lengths(cu_seqlens, B, T)  # refuses bounds that do not fit
        rotation = self._rotation(cos, sin, B, T, tokens)
        y = None
        if rank is None:
            y = self._by_kernels(x, cu_seqlens, rotation, past_key_values, keep)
        if y is None:
            y = self._mix_by_modules(x, cu_seqlens, rotation, past_key_values, keep, T, rank)
        if tokens is not None:
            y = y.new_zeros(B * T, y.shape[-1]).index_copy(0, tokens, y.squeeze(0)).view(B, T, -1)
        return y, None

    def _by_kernels(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        rotation: Rotation | None,
        cache: Any,
        keep: bool,
    ) -> torch.Tensor | None:
        """Return y and store new states if `keep`, or return None if no kernels support the call.

        With a cache, they support only a few tokens after cached states, without gradients.
        """
        recorded = torch.is_grad_enabled() or torch_private.forward_ad._current_level >= 0
        parts, state = None, None
        if cache is not None:
            few = 0 < x.shape[1] <= DECODE_TOKENS and cu_seqlens is None
            if not (few and keep) or recorded:
                return None
            parts, state = self._cached(cache, x.shape[0])
            if parts is None or state is None:
                return None
        weights = self._plain_weights()
        if weights is None:
            return None
        backend = requested_backend() if x.is_cuda else "torch"
        shape = self.num_heads, self.head_dim, self.norm_eps
        call = Call(*shape, compute_dtype(x), cu_seqlens, backend)
        if not supports_kernels(call, x, weights):
            return None
        if parts is None:
            run = record_adaptive if recorded else run_adaptive
            return run(call, self, rotation, x, weights)
        y, parts, state = decode(call, self, rotation, x, weights, parts, state)
        self._store(cache, parts, state, x.shape[1])
        return y

    def _mix_by_modules(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        rotation: Rotation | None,
        cache: Any,
        keep: bool,
        length: int,
        rank: RankSlice | None,
    ) -> torch.Tensor:
        """Compute y from the cache's states by the submodules; store the new states if `keep`.

        `length` is the number of tokens of a sequence, with padding.
        """
        parts, state = self._cached(
            cache, x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        )
        decodes = state is not None and length <= DECODE_TOKENS
        y, parts, state = mix_by_modules(
            self, x, cu_seqlens, rotation, parts, state, keep, decodes, rank
        )
        if keep:
            self._store(cache, parts, state, length)
        return y

    def _plain_weights(self) -> AdaptiveWeights | None:
        """Return the weights, or None if a submodule must be called because it was changed."""
        layer, b_proj = plain_weights(self, "A_log"), self._modules["b_proj"]
        if layer is None or not is_plain(b_proj, nn.Linear) or b_proj.bias is not None:
            return None
        return AdaptiveWeights(layer, b_proj.weight, self.dt_bias)

    def _rotation(
        self,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        B: int,
        T: int,
        tokens: torch.Tensor | None,
    ) -> Rotation | None:
        """Return the tables' rows for the tokens; `tokens` are those without padding."""
        if cos is None and sin is None:
            return None
        if cos is None or sin is None or cos.shape != sin.shape:
            shapes = [None if x is None else tuple(x.shape) for x in (cos, sin)]
            raise ValueError(f"cos and sin must both be given, of one shape; got {shapes}")
        shape, R = tuple(cos.shape), cos.shape[-1]
        rows = cos.numel() // max(1, R)
        fits = rows in (T, B * T) and shape[-2] == T and R <= self.head_dim and R % 2 == 0
        if not fits or cos.requires_grad or sin.requires_grad:
            raise ValueError(
                f"cos and sin must have shape [1 or {B}, 1, {T}, R] with an even R of at most "
                f"{self.head_dim}, and need no gradients; got {shape}"
            )
        tables = (x.reshape(rows, R) for x in (cos, sin))
        if tokens is not None:
            tables = (x[tokens % rows] for x in tables)
        return Rotation(*(x.contiguous() for x in tables))

    # The cache

    def _cached(self, cache: Any, sequences: int) -> tuple[Any, Any]:
        """Return the states of the convolutions and of the operator, None for those not cached."""
        if cache is None:
            return None, None
        if self.layer_idx is None:
            raise ValueError("a cache needs the layer's place: construct it with layer_idx")
        index, parts, state = self.layer_idx, None, None
        if hasattr(cache, "recurrent_states"):
            parts, state = cache.conv_states.get(index), cache.recurrent_states.get(index)
        elif len(cache) > index and cache[index] is not None:
            parts, state = cache[index].get("conv_state"), cache[index].get("recurrent_state")
        if state is not None and state.shape[0] != sequences:
            raise ValueError(
                f"the cache holds states of {state.shape[0]} sequences, and this call has "
                f"{sequences}"
            )
        return parts, state

    def _store(self, cache: Any, parts: Any, state: Any, length: int) -> None:
        if hasattr(cache, "update_quasar_state"):
            cache.update_quasar_state(self.layer_idx, state, parts)
        else:
            cache.update(
                recurrent_state=state, conv_state=parts, layer_idx=self.layer_idx, offset=length
            )


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
