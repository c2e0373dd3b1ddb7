"""Inputs of the operator: like a layer's, with correlated keys, and with fast decay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, WIDTH = 8, 64
NOISE = {"correlated 10%": 0.1, "correlated 1%": 0.01}
"""The noise on the common key, by the name of the kind of keys."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def layer_like(
    tokens: int, batch: int = 1, heads: int = HEADS, width: int = WIDTH, device: str = "cuda"
) -> Inputs:
    """Return q, k, v [B, T, H, S] bf16 as a layer with default weights has, and beta [H] fp32."""
    channels = heads * width

    def projected() -> Tensor:
        x = torch.randn(batch, tokens, channels, device=device) / 3**0.5
        taps = (torch.rand(channels, 1, 4, device=device) - 0.5) / 2**0.5
        y = F.conv1d(F.pad(x.mT, (3, 0)), taps, groups=channels).mT
        return F.silu(y).bfloat16().contiguous().view(batch, tokens, heads, width)

    q, k, v = projected(), projected(), projected()
    return q, k, v, F.softplus(torch.empty(heads, device=device).uniform_(1, 16).log())


def correlated(inputs: Inputs, noise: float) -> Inputs:
    """Replace the keys by one common vector per head plus `noise` times standard normal noise."""
    q, k, v, beta = inputs
    common = torch.randn(1, 1, HEADS, WIDTH, device="cuda")
    return q, (common + noise * torch.randn(k.shape, device="cuda")).bfloat16(), v, beta


def forgetting(tokens: int, slow_heads: int = 0) -> Inputs:
    """Return inputs that let the state decay within a thousand tokens, except in the first heads.

    Keys are normal noise of deviation 0.15. beta is 1e-3 in the first `slow_heads` heads, and 1 in
    the others; q and v are those of `layer_like`.
    """
    q, k, v, beta = layer_like(tokens)
    beta = torch.ones_like(beta)
    beta[:slow_heads] = 1e-3
    return q, (0.15 * torch.randn_like(k)), v, beta
