"""Inputs that the kernel tests share: layer-like ones and hostile ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LIMIT = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
"""Largest relative RMS error against the float64 recurrence, by dtype."""


def layer_like(
    T: int, B: int = 1, H: int = 2, S: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [B, T, H, S] as a layer with default weights makes them, and beta [H]."""
    torch.manual_seed(seed)

    def projected() -> Tensor:
        x = torch.randn(B, T + 3, H * S) / 3**0.5
        taps = (torch.rand(H * S, 4) - 0.5) / 2**0.5
        mixed = sum(x[:, j : j + T] * taps[:, j] for j in range(4))
        return F.silu(mixed).view(B, T, H, S)

    q, k, v = (projected().to(dtype) for _ in range(3))
    return q, k, v, F.softplus(torch.empty(H).uniform_(1, 16).log())


def _signs(k: Tensor) -> Tensor:
    return (1 - 2 * (torch.arange(k.shape[1]) % 2)).view(1, -1, 1, 1)


HOSTILE_KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda k: torch.ones_like(k) * 0.3,
    "alternating sign": lambda k: k[:, :1] * _signs(k),
    "one common key and 1% noise": lambda k: k[:, :1] + 0.01 * torch.randn_like(k),
    "mixed norms": lambda k: k * 10 ** torch.empty_like(k[..., :1]).uniform_(-3, 1),
    "half zeros": lambda k: k * (torch.rand_like(k[..., :1]) < 0.5),
    "all zeros": lambda k: torch.zeros_like(k),
    "norm 80": lambda k: F.normalize(k, dim=-1) * 80,
    "norm 1e-6": lambda k: F.normalize(k, dim=-1) * 1e-6,
}
