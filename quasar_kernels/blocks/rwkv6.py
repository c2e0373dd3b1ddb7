"""RWKV-6 time mixing: token shift with data-dependent mixing, WKV6, group norm and a SiLU gate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fla.ops.quasar.arguments import expect, expect_sizes
from fla.ops.quasar.layer.wrapped import is_plain
from fla.ops.quasar.parameters import MarkedParameters, set_values
from torch import Tensor, nn

from quasar_kernels.blocks import wkv6
from quasar_kernels.blocks.backends import Backend
from quasar_kernels.blocks.earlier import Earlier
from quasar_kernels.blocks.initial import ScaledLinear
from quasar_kernels.blocks.parallel import MixerSlice

STREAMS = 5
"""Mixtures of a token and its predecessor: for decay, key, value, receptance and gate."""


class TimeMixingState(NamedTuple):
    """The state of time mixing for N sequences between calls."""

    before: Tensor  # [N, 1, width], the last token's input
    wkv: Tensor  # [N, heads, S, S] fp32, keys first


class RWKV6TimeMixing(MarkedParameters):  # type: ignore[misc]
    """RWKV-6's time mixing ("Finch", arXiv 2404.05892) with its authors' initialisation.

    Args:
        width: channels of the input and the output.
        heads: number of heads, of width / heads channels each.
        layer, layers: this layer's index from 0 and the number of layers, on which the initial
            parameters depend.
        mix_rank, decay_rank: ranks of the low-rank maps from the data to mixing and decay.
        output_scale: factor of the initial output weights.

    Raises:
        ValueError: a size is below 1, width is not a multiple of heads, or `layer` is not in
            0 to `layers` - 1.
    """

    # its authors decay the weights of linear layers only
    UNDECAYED = (
        "mix_input",
        "mix",
        "mix_down",
        "mix_up",
        "decay",
        "decay_down",
        "decay_up",
        "bonus",
    )

    def __init__(
        self,
        width: int,
        heads: int,
        layer: int = 0,
        layers: int = 1,
        mix_rank: int = 32,
        decay_rank: int = 64,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__()
        sizes = {"mix_rank": mix_rank, "decay_rank": decay_rank}
        expect_sizes(width=width, heads=heads, layers=layers, **sizes)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads; got {width} and {heads}")
        if not 0 <= layer < layers:
            raise ValueError(f"layer must be one of 0 to {layers - 1}; got {layer}")
        self.width, self.heads = width, heads
        self._place = layer, layers
        self.mix_input = nn.Parameter(torch.empty(width))
        self.mix = nn.Parameter(torch.empty(STREAMS, width))
        self.mix_down = nn.Parameter(torch.empty(width, STREAMS * mix_rank))
        self.mix_up = nn.Parameter(torch.empty(STREAMS, mix_rank, width))
        self.decay = nn.Parameter(torch.empty(width))
        self.decay_down = nn.Parameter(torch.empty(width, decay_rank))
        self.decay_up = nn.Parameter(torch.empty(decay_rank, width))
        self.bonus = nn.Parameter(torch.empty(heads, width // heads))
        self.reset_parameters()
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.norm = nn.GroupNorm(heads, width, eps=64e-5)
        self.output = ScaledLinear(width, width, output_scale)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters that belong to no child module."""
        layer, layers = self._place
        depth, height = layer / max(1, layers - 1), 1 - layer / layers
        # in at least fp32, and then rounded to the parameters' dtype
        wide = torch.promote_types(self.decay.dtype, torch.float32)
        channel = torch.arange(self.width, dtype=wide, device=self.decay.device)
        rising = channel / self.width
        # the share of the previous token, smaller in the first channels and in upper layers
        mixing = [
            1 - rising**height,
            1 - rising**height,
            1 - rising**height - 0.3 * depth,
            *(1 - rising ** (height / 2) for _ in range(2)),
        ]
        set_values(self.mix_input, 1 - rising**height)
        set_values(self.mix, torch.stack(mixing))
        self.mix_down.zero_()
        self.mix_up.uniform_(-0.01, 0.01)
        share = channel / max(1, self.width - 1)
        set_values(self.decay, -6 + 5 * share ** (0.7 + 1.3 * depth))
        self.decay_down.zero_()
        self.decay_up.uniform_(-0.01, 0.01)
        zigzag = 0.1 * ((channel + 1) % 3 - 1)
        set_values(self.bonus, (depth * (1 - share) + zigzag).view(self.heads, -1))

    def forward(
        self,
        x: Tensor,
        state: TimeMixingState | None = None,
        cu_seqlens: Tensor | None = None,
        cp_context: Any = None,
    ) -> tuple[Tensor, TimeMixingState]:
        """Return y `[B, T, width]` and each sequence's state, as `HybridBlock.forward` does.

        The state is always returned, and an earlier one is not overwritten.
        """
        expect("x", x, ("B", "T", self.width))
        heads = (self.heads, self.width // self.heads)
        before = None if state is None else state.before
        slice_ = None
        if cp_context is not None:
            slice_ = MixerSlice(cp_context, x.shape[1])
            before, cu_seqlens = slice_.before(x, 1), slice_.cu_seqlens
        earlier = Earlier(x, before, 1, cu_seqlens)
        mixtures = self._mixed(x, earlier.shifted(1))
        for_decay, for_key, for_value, for_receptance, for_gate = mixtures
        r = self.receptance(for_receptance).unflatten(-1, heads)
        k, v = self.key(for_key).unflatten(-1, heads), self.value(for_value).unflatten(-1, heads)
        w = self._log_decay(for_decay).unflatten(-1, heads)
        last = None if state is None else state.wkv
        o, wkv = wkv6.wkv6(r, k, v, w, self.bonus, last, cu_seqlens)
        if slice_ is not None:
            o, wkv = slice_.add_entering_state(o, wkv, r, w, reads_decayed=False)
        y = self.output(self._normed(o).to(v.dtype) * F.silu(self.gate(for_gate)))
        return y, TimeMixingState(earlier.last(), wkv)

    def _mixed(self, x: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        """Return x mixed with the token before, `[B, T, width]` for each stream."""
        # in x's dtype, because fp32 parameters would make all streams fp32
        mix_input, mix = self.mix_input.to(x.dtype), self.mix.to(x.dtype)
        change = before - x
        hidden = torch.tanh((x + change * mix_input) @ self.mix_down)
        hidden = hidden.unflatten(-1, (STREAMS, -1)).movedim(-2, 0).flatten(1, 2)
        shares = torch.bmm(hidden, self.mix_up).unflatten(1, x.shape[:2])
        return (x + change * (mix[:, None, None] + shares)).unbind(0)

    def _normed(self, o: Tensor) -> Tensor:
        """Return o `[B, T, heads, S]` normed per head, then scaled and shifted, `[B, T, width]`.

        The result equals that of the module `norm`; the module's gradient takes twice as long.
        """
        if not is_plain(self.norm, nn.GroupNorm):
            rows: Tensor = self.norm(o.to(self.bonus.dtype).flatten(0, 1).flatten(1))
            return rows.view(*o.shape[:2], -1)
        weight, bias = self.norm.weight, self.norm.bias
        heads = F.layer_norm(o.to(weight.dtype), o.shape[-1:], eps=self.norm.eps)
        return torch.addcmul(bias, heads.flatten(-2), weight)

    def _log_decay(self, x: Tensor) -> Tensor:
        """Return the log decay of each channel, `[B, T, width]`, in fp32 (fp64 for fp64 x)."""
        moved = torch.tanh(x @ self.decay_down) @ self.decay_up
        wide = torch.float64 if self.decay.dtype == torch.float64 else torch.float32
        return -torch.exp(self.decay.to(wide) + moved.to(wide))

    def backend(self, dtype: torch.dtype | None = None) -> Backend:
        """Return WKV6's backend for autocast's `dtype`; None is the parameters' dtype."""
        weight = self.bonus
        return wkv6.OPERATOR.backend(
            weight.device, dtype or weight.dtype, width=self.width // self.heads
        )
