"""A linear layer with scaled initial parameters."""

from __future__ import annotations

import torch
from torch import nn


class ScaledLinear(nn.Linear):
    """A linear layer with torch's initial parameters times `scale`.

    `reset_parameters` scales them, too. Trainers call it for each module after `to_empty`, in any
    order, so a parent cannot scale them.
    """

    def __init__(self, inputs: int, outputs: int, scale: float, bias: bool = False) -> None:
        self.scale = scale  # read by the base class's constructor
        super().__init__(inputs, outputs, bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters."""
        super().reset_parameters()
        for parameter in self.parameters():
            parameter.mul_(self.scale)
