"""How a hybrid block combines its branches: channel gains, head gates, or a normalised mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fla.ops.quasar.parameters import MarkedParameters, set_values
from torch import Tensor, nn

from quasar_kernels.blocks.initial import ScaledLinear

FIRST_GAIN, OTHER_GAINS = 0.7, 0.3
"""The initial gains: the first branch has the larger one."""


class ChannelGains(MarkedParameters):  # type: ignore[misc]
    """Multiplies each branch by one learned gain per channel."""

    UNDECAYED = ("gains",)

    def __init__(self, branches: int, width: int, _heads: int) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.empty(branches, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial gains."""
        start = torch.full(self.gains.shape, OTHER_GAINS, device=self.gains.device)
        start[0] = FIRST_GAIN
        set_values(self.gains, start)

    def forward(self, _x: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the terms of the sum, `[B, T, width]` each; x is the block's normed input."""
        return [gain * y for gain, y in zip(self.gains, outputs, strict=True)]


class GatedHeads(nn.Module):
    """Weights the branches, per token and head, by a softmax over the branches.

    A linear layer computes the logits from the block's input. They are initially 0.
    """

    def __init__(self, branches: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.gate = ScaledLinear(width, branches * heads, 0.0, bias=True)

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the terms of the sum, as `ChannelGains` does."""
        shares = self.gate(x).float().unflatten(-1, (len(outputs), self.heads)).softmax(-2)
        return [
            (share[..., None] * y.unflatten(-1, (self.heads, -1))).flatten(-2)
            for share, y in zip(shares.to(x.dtype).unbind(-2), outputs, strict=True)
        ]


class NormalisedMean(nn.Module):
    """Averages the branches after an RMS norm of each, as in Hymba (arXiv 2411.13676)."""

    def __init__(self, branches: int, width: int, _heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(branches))

    def forward(self, _x: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the terms of the sum, as `ChannelGains` does."""
        return [norm(y) / len(outputs) for norm, y in zip(self.norms, outputs, strict=True)]


FUSIONS: dict[str, type[ChannelGains | GatedHeads | NormalisedMean]] = {
    "gains": ChannelGains,
    "gated": GatedHeads,
    "mean": NormalisedMean,
}
