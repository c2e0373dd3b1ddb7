"""Mamba-2: projection, causal convolution over four tokens, SSD with a skip, and gated norm."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fla.ops.quasar.arguments import expect, expect_epsilon, expect_sizes
from fla.ops.quasar.layer.wrapped import is_plain
from fla.ops.quasar.parameters import MarkedParameters
from torch import Tensor, nn

from quasar_kernels.blocks import ssd
from quasar_kernels.blocks.backends import Backend
from quasar_kernels.blocks.earlier import Earlier
from quasar_kernels.blocks.initial import ScaledLinear
from quasar_kernels.blocks.parallel import MixerSlice

TAPS = 4
STATES = range(16, 129)
"""Permitted state sizes."""
ALIGNED = 8
"""Projections are padded to a multiple of this width; other widths are several times slower."""
SMALLEST_STEP, LARGEST_STEP = 1e-3, 1e-1
"""Bounds of the initial step sizes, which are log-uniform between them."""


class Mamba2State(NamedTuple):
    """The state of N sequences that a Mamba-2 layer keeps between calls."""

    before: Tensor  # [N, 3, inner + 2 groups x state], the convolution's last inputs
    ssd: Tensor  # [N, heads, state, inner / heads] fp32


class Mamba2(MarkedParameters):  # type: ignore[misc]
    """The Mamba-2 layer (arXiv 2405.21060) with its authors' initialisation.

    Args:
        width: channels of the input and the output.
        heads: number of heads; each has `expand * width / heads` channels and a separate decay.
        state: channels of B and of C, which are a head's keys and queries, 16 to 128.
        expand: the inner width divided by `width`.
        groups: number of groups of equally many heads; all heads of a group share B and C.
        eps: epsilon of the norm.
        output_scale: factor of the initial output weights.

    Raises:
        ValueError: a size below 1, an epsilon below 0, a state outside 16 to 128, or heads that do
            not divide `expand * width` or are not a multiple of groups.
    """

    UNDECAYED = ("step_bias", "rate_log", "skip")

    def __init__(
        self,
        width: int,
        heads: int,
        state: int = 64,
        expand: int = 2,
        groups: int = 1,
        eps: float = 1e-5,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__()
        expect_sizes(width=width, heads=heads, state=state, expand=expand, groups=groups)
        expect_epsilon("eps", eps)
        inner = expand * width
        if state not in STATES:
            raise ValueError(f"state must be {STATES[0]} to {STATES[-1]}; got {state}")
        if inner % heads or heads % groups:
            raise ValueError(
                f"heads must divide expand * width = {inner} and be a multiple of groups; got "
                f"{heads} heads and {groups} groups"
            )
        self.heads, self.state, self.groups, self.eps = heads, state, groups, eps
        mixed = inner + 2 * groups * state
        self.width = width
        self.sizes = (inner, mixed, heads)
        self._padding = -sum(self.sizes) % ALIGNED
        self.input = nn.Linear(width, sum(self.sizes), bias=False)
        self.convolution = nn.Conv1d(mixed, mixed, TAPS, groups=mixed)
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.rate_log = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.norm = nn.Parameter(torch.empty(inner))
        self.reset_parameters()
        self.output = ScaledLinear(inner, width, output_scale)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters that belong to no child module; steps and rates are random."""
        # in at least fp32, and then rounded to the parameters' dtype
        wide = torch.promote_types(self.step_bias.dtype, torch.float32)
        step, rate = (torch.empty_like(x, dtype=wide) for x in (self.step_bias, self.rate_log))
        step = step.uniform_(math.log(SMALLEST_STEP), math.log(LARGEST_STEP)).exp()
        self.step_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus gives step
        self.rate_log.copy_(rate.uniform_(1, 16).log())
        self.skip.fill_(1)
        self.norm.fill_(1)

    def forward(
        self,
        x: Tensor,
        state: Mamba2State | None = None,
        cu_seqlens: Tensor | None = None,
        cp_context: Any = None,
    ) -> tuple[Tensor, Mamba2State]:
        """Return y `[B, T, width]` and each sequence's state, as `HybridBlock.forward` does.

        The state is always returned, and an earlier one is not overwritten.
        """
        expect("x", x, ("B", "T", self.width))
        gate, mixed, step = self._projected(x)
        before = None if state is None else state.before
        slice_ = None
        if cp_context is not None:
            slice_ = MixerSlice(cp_context, x.shape[1])
            before, cu_seqlens = slice_.before(mixed, TAPS - 1), slice_.cu_seqlens
        earlier = Earlier(mixed, before, TAPS - 1, cu_seqlens)
        if is_plain(self.convolution, nn.Conv1d):
            taps = self.convolution.weight.squeeze(1)
            mixed = earlier.convolved(taps, self.convolution.bias)
        else:
            mixed = earlier.convolved_by(self.convolution)
        narrow = self.groups * self.state
        values, B, C = mixed.split([self.sizes[0], narrow, narrow], dim=-1)
        wide = torch.promote_types(self.rate_log.dtype, torch.float32)
        steps = F.softplus(step.to(wide) + self.step_bias.to(wide))
        rates = -torch.exp(self.rate_log.to(wide))
        reads = C.unflatten(-1, (self.groups, self.state))
        o, last = ssd.ssd(
            values.unflatten(-1, (self.heads, -1)),
            steps,
            rates,
            B.unflatten(-1, (self.groups, self.state)),
            reads,
            self.skip,
            None if state is None else state.ssd,
            cu_seqlens,
        )
        if slice_ is not None:
            reads = reads.repeat_interleave(self.heads // self.groups, 2)
            decays = (steps * rates).unsqueeze(-1)
            o, last = slice_.add_entering_state(o, last, reads, decays, reads_decayed=True)
        gated = o.flatten(-2) * F.silu(gate)
        normed = F.rms_norm(gated.to(wide), self.norm.shape, self.norm.to(wide), self.eps)
        y = self.output(normed.to(gated.dtype))
        return y, Mamba2State(earlier.last(), last)

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the gate, the convolution's inputs, and the steps before their bias and softplus.

        Each is `[B, T, n]`; `sizes` holds the three n.
        """
        if not is_plain(self.input, nn.Linear) or self.input._parameters["bias"] is not None:
            return self.input(x).split(self.sizes, dim=-1)
        # the projection is padded with zeros to a multiple of ALIGNED channels
        projected = F.linear(x, F.pad(self.input.weight, (0, 0, 0, self._padding)))
        return projected.split([*self.sizes, self._padding], dim=-1)[:3]

    def backend(self, dtype: torch.dtype | None = None) -> Backend:
        """Return the implementation of SSD for this layer.

        Args:
            dtype: autocast's dtype; None selects the parameters' dtype.
        """
        weight = self.norm
        return ssd.OPERATOR.backend(
            weight.device,
            dtype or weight.dtype,
            width=self.state,
            values=self.sizes[0] // self.heads,
        )
