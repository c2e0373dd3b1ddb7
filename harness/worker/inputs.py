"""Inputs that the referee and the subject draw from one seed, instead of sending gigabytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def drawn(shape: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """Return standard normal fp32 values, the same in each process for one seed and device."""
    return fill(torch.empty(*shape, device=device), seed)


def fill(tensor: Tensor, seed: int) -> Tensor:
    """Fill a contiguous fp32 tensor with the values of `drawn` for its shape, and return it."""
    return tensor.normal_(generator=torch.Generator(tensor.device).manual_seed(seed))
