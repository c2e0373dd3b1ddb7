"""The calls that are compared: WKV6's inputs, implementations, gradients and float64 results.

`triton` and `cuda` are this project's; `chunk` and `recurrent` are the host library's
`chunk_rwkv6` and `fused_recurrent_rwkv6`, given the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.operator.training_results import Shape
from quasar_kernels.blocks.chunked import decayed_attention
from quasar_kernels.blocks.wkv6 import OPERATOR

HOST = ("chunk", "recurrent")
NAMES = ("triton", "cuda", *HOST)
TENSORS = ("r", "k", "v", "w", "u")


class Inputs(NamedTuple):
    """A call's tensors."""

    r: Tensor  # [B, T, H, S] bf16
    k: Tensor  # the same
    v: Tensor  # the same
    w: Tensor  # log decays, [B, T, H, S] fp32
    u: Tensor  # [H, S] fp32


Function = Callable[..., tuple[Tensor, Tensor]]


def draw(shape: Shape, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Draw noise, and decays as a fresh RWKV-6 layer has them, moved by the data.

    Such a layer spreads its channels' log rates from -6 to -1 (arXiv 2404.05892); here each token
    adds noise of half a unit.
    """
    batch, tokens, heads, width = shape
    r, k, v = (torch.randn(batch, tokens, heads, width, device=device) for _ in range(3))
    rates = torch.linspace(-6, -1, heads * width, device=device).view(heads, width)
    w = -torch.exp(rates + 0.5 * torch.randn(batch, tokens, heads, width, device=device))
    u = 0.5 * torch.randn(heads, width, device=device)
    return Inputs(r.to(dtype), k.to(dtype), v.to(dtype), w, u)


def implementation(name: str) -> Function:
    """Return a function of r, k, v, w and u by one of NAMES: outputs and the final state.

    This project's are called by name, whatever would take the call by its length.
    """
    if name in ("triton", "cuda"):
        call = OPERATOR.named(name).call
        return lambda *x: call(*x, None, None)
    from fla.ops import rwkv6

    function: Any = rwkv6.chunk_rwkv6 if name == "chunk" else rwkv6.fused_recurrent_rwkv6

    def host(*x: Tensor) -> tuple[Tensor, Tensor]:
        o, final = function(*x, scale=1.0, output_final_state=True)
        return o, final

    return host


def exact(*x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same from float64 tensors, in float64, by halved chunks."""
    r, k, v, w, u = x
    return decayed_attention(r, k, v, w, u)


def gradients(function: Function, x: Inputs, do: Tensor) -> tuple[Tensor, ...]:
    """Run forward and backward; return the gradients of r, k, v, w and u."""
    leaves = [t.detach().requires_grad_() for t in x]
    with torch.enable_grad():
        o, _ = function(*leaves)
        return torch.autograd.grad(o, leaves, do.to(o.dtype))
