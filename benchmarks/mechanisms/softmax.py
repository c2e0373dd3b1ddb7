"""Softmax attention: torch's, on the flash kernels."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engine.comparison import Inputs, Shape
from benchmarks.engine.mechanism import HEADS, WIDTH, Bounds, Calls, Implementation, calls, noise

CACHE_TOKENS = 4096
"""Keys and values in the cache of a decoded token."""


def draw(shape: Shape, device: str) -> Inputs:
    """Draw q, k and v in bf16."""
    return {name: noise(shape, device).bfloat16() for name in ("q", "k", "v")}


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend causally, or to all keys and values of a cache `[2, B, T, H, S]`, the state."""
    q, k, v = x["q"], x["k"], x["v"]
    if state is not None:
        return _attended(q, state[0].to(q.dtype), state[1].to(q.dtype), causal=False), state
    edges = [0, q.shape[1]] if bounds is None else bounds.tolist()
    rows = [slice(*edge) for edge in pairwise(edges)]
    o = [_attended(q[:, n], k[:, n], v[:, n], causal=True) for n in rows]
    return torch.cat(o, 1), torch.stack([k, v])


def _attended(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def make(device: str) -> Calls:

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o: Tensor = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
            )
        return o.transpose(1, 2)

    def chunks(x: Inputs, bounds: Bounds | None) -> Tensor:
        if bounds is None:
            return attend(x["q"], x["k"], x["v"], True)
        lengths = bounds.host.diff().tolist()
        sizes = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(x[name][0], bounds.here, **sizes)
            for name in ("q", "k", "v")
        )
        return attend(q, k, v, True).values()[None]

    def step(x: Inputs, state: Tensor) -> Tensor:
        return attend(x["q"], state[0], state[1], False)

    def state(batch: int) -> Tensor:
        shape = (2, batch, CACHE_TOKENS, HEADS, WIDTH)
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def operations(lengths: list[int]) -> float:
        return sum(2.0 * n * n * HEADS * WIDTH for n in lengths)

    return calls(
        draw,
        exact,
        device,
        chunks=chunks,
        step=step,
        state=state,
        operations=operations,
        changes_state=False,
        backward_operations=2.5,
    )


IMPLEMENTATIONS = {"softmax": Implementation("softmax attention", "torch", make, power=2)}
