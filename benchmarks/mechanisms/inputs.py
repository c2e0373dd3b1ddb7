"""Each mechanism's inputs as a fresh layer makes them, and its results in float64.

Tensors of three or more dimensions are `[B, T, ...]`, all others are shared by all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.delta_rule.calls import draw as draw_delta
from benchmarks.delta_rule.results import Rule
from benchmarks.operator.training_results import Shape
from benchmarks.wkv6.calls import draw as draw_wkv6
from harness.tuning.inputs import layer_like
from quasar_kernels.blocks.chunked import decayed_attention
from quasar_kernels.delta_reference import delta_chunked
from quasar_kernels.reference import quasar_chunked

STATE = 64
"""Mamba-2's state size, as quasar_kernels.blocks.Mamba2 has it by default."""
GATE_NORMALIZER = 16
"""GLA's log decays are log-sigmoids over this (arXiv 2312.06635)."""
SLOWEST, FASTEST = 1e-3, 1e-1
"""Mamba-2's step sizes lie between, evenly in their logarithm, as do KDA's softplus biases."""
RWKV7_BOUND = -0.6065306597126334
"""RWKV-7's log decays are sigmoids times this, -exp(-1/2) (arXiv 2503.14456)."""

Inputs = dict[str, Tensor]
Exact = Callable[[Inputs, Any, Tensor | None], tuple[Tensor, Tensor]]
"""Takes inputs in float64, a state or None, and bounds of packed sequences or None; returns o
`[B, T, H, V]` and the state after each sequence."""


class Mechanism(NamedTuple):
    """What is computed, whoever computes it."""

    draw: Callable[[Shape, str], Inputs]
    exact: Exact


def part(x: Inputs, tokens: int) -> Inputs:
    """Return the inputs of the first tokens."""
    return {name: t[:, :tokens] if t.ndim > 2 else t for name, t in x.items()}


def wide(x: Inputs) -> Inputs:
    """Return the inputs in float64."""
    return {name: t.double() for name, t in x.items()}


def steps(heads: int, device: str) -> Tensor:
    """Draw step sizes `[H]` evenly in their logarithm; fp32."""
    low, high = (torch.tensor(x).log10() for x in (SLOWEST, FASTEST))
    return 10 ** torch.empty(heads, device=device).uniform_(float(low), float(high))


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    a: Tensor | None = None, b: Tensor | None = None,
    state: Tensor | None = None, bounds: Tensor | None = None, u: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Walk S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T, o_t = S_t^T q_t.

    All in the tensors' dtype, `[B, T, H, *]`; without `a` and `b` the product is left out. With a
    bonus u `[H, K]`, o_t = (S_{t-1} + diag(u) k_t v_t^T)^T q_t.
    """
    edges = [0, q.shape[1]] if bounds is None else bounds.tolist()
    sequences = q.shape[0] if bounds is None else len(edges) - 1
    start = q.new_zeros(sequences, *q.shape[2:], v.shape[-1])
    start = start if state is None else state.to(q.dtype)
    outputs, finals = [], []
    for n, (first, last) in enumerate(pairwise(edges)):
        S = start if bounds is None else start[n : n + 1]
        for t in range(first, last):
            written = k[:, t, :, :, None] * v[:, t, :, None]
            kept = g[:, t, :, :, None].exp() * S + written
            if a is not None and b is not None:
                kept = kept + b[:, t, :, :, None] * (a[:, t, :, :, None] * S).sum(-2, keepdim=True)
            read = kept if u is None else S + u[..., None] * written
            outputs.append((q[:, t, :, :, None] * read).sum(-2))
            S = kept
        finals.append(S)
    return torch.stack(outputs, 1), torch.cat(finals)


def _noise(shape: Shape, device: str) -> Tensor:
    return torch.randn(shape.batch, shape.tokens, shape.heads, shape.width, device=device)


def _draw_quasar(shape: Shape, device: str) -> Inputs:
    drawn = layer_like(shape.tokens, shape.batch, shape.heads, shape.width, device)
    return dict(zip(("q", "k", "v", "beta"), drawn, strict=True))


def _exact_quasar(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    return quasar_chunked(x["q"], x["k"], x["v"], x["beta"], state, bounds)


def _delta(rule: Rule) -> Mechanism:
    def draw(shape: Shape, device: str) -> Inputs:
        drawn = draw_delta(rule, shape, device)
        return {name: t for name, t in drawn._asdict().items() if t is not None}

    def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
        scale = x["q"].shape[-1] ** -0.5
        tensors = (x["q"], x["k"], x["v"], x["beta"], x.get("g"))
        return delta_chunked(*tensors, state, bounds, scale=scale)

    return Mechanism(draw, exact)


def _draw_kda(shape: Shape, device: str) -> Inputs:
    x = draw_delta("delta rule", shape, device)
    A = torch.empty(shape.heads, 1, device=device).uniform_(1, 16)
    bias = steps(shape.heads * shape.width, device).view(shape.heads, shape.width).expm1().log()
    g = -A * F.softplus(_noise(shape, device) + bias)
    return {"q": x.q, "k": x.k, "v": x.v, "g": g, "beta": x.beta}


def _exact_kda(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    # a key reads the state behind its decay, and takes its share of what it read out of it
    write = x["beta"][..., None] * x["k"]
    read = -x["k"] * x["g"].exp()
    q = x["q"] * x["q"].shape[-1] ** -0.5
    return recurrence(q, write, x["v"], x["g"], read, write, state, bounds)


def _draw_gla(shape: Shape, device: str) -> Inputs:
    q, k, v = (_noise(shape, device).bfloat16() for _ in range(3))
    return {"q": q, "k": k, "v": v, "g": F.logsigmoid(_noise(shape, device)) / GATE_NORMALIZER}


def _exact_gla(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    q = x["q"] * x["q"].shape[-1] ** -0.5
    return decayed_attention(q, x["k"], x["v"], x["g"], None, state, bounds)


def _exact_wkv6(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    return decayed_attention(x["r"], x["k"], x["v"], x["w"], x["u"], state, bounds)


def _draw_rwkv7(shape: Shape, device: str) -> Inputs:
    r, k, v = (_noise(shape, device).bfloat16() for _ in range(3))
    w = RWKV7_BOUND * _noise(shape, device).sigmoid()
    removed = F.normalize(_noise(shape, device), dim=-1)
    added = removed * _noise(shape, device).sigmoid()
    return {"r": r, "w": w, "k": k, "v": v, "a": -removed.bfloat16(), "b": added.bfloat16()}


def _exact_rwkv7(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    return recurrence(x["r"], x["k"], x["v"], x["w"], x["a"], x["b"], state, bounds)


def _draw_mamba2(shape: Shape, device: str) -> Inputs:
    x = F.silu(_noise(shape, device))
    B, C = (F.silu(_noise(shape._replace(heads=1, width=STATE), device)) for _ in range(2))
    bias = steps(shape.heads, device).expm1().log()
    dt = F.softplus(torch.randn(shape[:3], device=device) + bias)
    A = -torch.empty(shape.heads, device=device).uniform_(1, 16)
    return {"x": x.bfloat16(), "dt": dt, "A": A, "B": B.bfloat16(), "C": C.bfloat16()}


def _exact_mamba2(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    heads = x["x"].shape[2]
    q, k = (x[name].repeat_interleave(heads, 2) for name in ("C", "B"))
    v = x["dt"][..., None] * x["x"]
    return decayed_attention(q, k, v, (x["dt"] * x["A"])[..., None], None, state, bounds)


def _draw_softmax(shape: Shape, device: str) -> Inputs:
    return {name: _noise(shape, device).bfloat16() for name in ("q", "k", "v")}


def _exact_softmax(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
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


def _wkv6_inputs(shape: Shape, device: str) -> Inputs:
    return draw_wkv6(shape, device)._asdict()


MECHANISMS: Mapping[str, Mechanism] = {
    "Quasar": Mechanism(_draw_quasar, _exact_quasar),
    "delta rule": _delta("delta rule"),
    "gated delta rule": _delta("gated delta rule"),
    "KDA": Mechanism(_draw_kda, _exact_kda),
    "GLA": Mechanism(_draw_gla, _exact_gla),
    "RWKV-6": Mechanism(_wkv6_inputs, _exact_wkv6),
    "RWKV-7": Mechanism(_draw_rwkv7, _exact_rwkv7),
    "Mamba-2": Mechanism(_draw_mamba2, _exact_mamba2),
    "softmax attention": Mechanism(_draw_softmax, _exact_softmax),
}
"""By the names of names.py."""
