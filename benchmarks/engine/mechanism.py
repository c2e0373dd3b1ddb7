"""A mechanism of the comparison: inputs, float64 results, and implementations' calls.

Tensors of three or more dimensions are `[B, T, ...]`; the others are shared by all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.engine.comparison import Inputs, Shape
from benchmarks.engine.results import Entry

OURS, FLA, SEQUENTIAL = "quasar_kernels", "fla-core", "torch, token by token"
"""Sources of the implementations."""
HEADS, WIDTH = 8, 64
SEQUENTIAL_TOKENS = 1024
"""Longest call of implementations that launch several operations for each token."""
SLOWEST, FASTEST = 1e-3, 1e-1
"""Bounds of step sizes, which are log-uniform between them, as in Mamba-2's initialisation."""


class Bounds(NamedTuple):
    """The bounds of packed sequences, `[N + 1]` int64."""

    here: Tensor  # on the tensors' device
    host: Tensor


Exact = Callable[[Inputs, Any, Tensor | None], tuple[Tensor, Tensor]]
"""Takes inputs in float64, a state or None, and bounds of packed sequences or None; returns o
`[B, T, H, V]` and the state after each sequence."""
Chunks = Callable[[Inputs, Bounds | None], Tensor]
Step = Callable[[Inputs, Any], Tensor]


class Calls(NamedTuple):
    """The functions that draw an implementation's inputs and call it."""

    draw: Callable[[int, int], Inputs]  # arguments: numbers of sequences and of tokens
    exact: Exact
    chunks: Chunks  # returns o of whole sequences
    step: Step  # returns o of one token from states, which it may overwrite
    state: Callable[[int], Any]  # draws states of sequences: a tensor or a similar object
    operations: Callable[[list[int]], float] = lambda _: 0.0
    """Returns the least floating-point operations of the products in a forward pass, by lengths."""
    packs: str = ""  # the reason against packed sequences; empty if they are supported
    parameters: tuple[Tensor, ...] = ()  # further tensors that need gradients
    like: str = "v"  # the input that has the output's shape and dtype
    changes_state: bool = True  # whether a step reads the state and writes it
    backward_operations: float = 2  # ratio of the backward pass to the forward pass


class Implementation(NamedTuple):
    """One line of the comparison."""

    mechanism: str
    by: str  # source of the implementation
    make: Callable[[str], Calls] | None  # for a device; imports the implementation
    power: int = 1  # exponent of the growth of its time with tokens
    longest: int | None = None  # tokens of a call; None: all lengths are measured
    entries: Callable[[str], Iterator[Entry]] | None = None  # instead of calls, for a device


def calls(draw: Callable[[Shape, str], Inputs], exact: Exact, device: str, **how: Any) -> Calls:
    """Return the calls of an operator over 8 heads of 64, with random states."""

    def sequences(batch: int, tokens: int) -> Inputs:
        return draw(Shape(batch, tokens, HEADS, WIDTH), device)

    def state(batch: int) -> Tensor:
        return torch.randn(batch, HEADS, WIDTH, WIDTH, device=device)

    return Calls(**{"draw": sequences, "exact": exact, "state": state, **how})


def imported(module: str, *names: str) -> list[Any]:
    """Import functions without types: fla's decorators remove them."""
    return [getattr(import_module(module), name) for name in names]


def packed(bounds: Bounds | None) -> dict[str, Tensor]:
    """Return the arguments of fla's chunk functions for bounds."""
    return {} if bounds is None else {"cu_seqlens": bounds.here, "cu_seqlens_cpu": bounds.host}


def of_fla(name: str, **options: Any) -> dict[str, Any]:
    """Return the calls of fla's functions of a mechanism, which take the inputs by name."""
    chunk, recurrent = imported(f"fla.ops.{name}", f"chunk_{name}", f"fused_recurrent_{name}")
    bound = options.pop("chunk_options", {})
    return {
        "chunks": lambda x, bounds: chunk(**x, **options, **bound, **packed(bounds))[0],
        "step": lambda x, state: recurrent(
            **x, **options, initial_state=state, output_final_state=True
        )[0],
    }


def one_by_one(recur: Callable[[Inputs, Tensor | None], Tensor], like: str = "v") -> dict[str, Any]:
    """Return the calls of a definition in fp32, token by token."""

    def call(x: Inputs, state: Tensor | None) -> Tensor:
        return recur({name: t.float() for name, t in x.items()}, state)

    why = "one token after the other is timed over one sequence"
    return {"chunks": lambda x, _: call(x, None), "step": call, "packs": why, "like": like}


def noise(shape: Shape, device: str) -> Tensor:
    """Draw `[B, T, H, S]` fp32."""
    return torch.randn(*shape, device=device)


def steps(heads: int, device: str) -> Tensor:
    """Draw log-uniform step sizes `[H]` in fp32."""
    low, high = (torch.tensor(x).log10() for x in (SLOWEST, FASTEST))
    return 10 ** torch.empty(heads, device=device).uniform_(float(low), float(high))


def recurrence(  # its tensors
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T, o_t = S_t^T q_t.

    All in the tensors' dtype, `[B, T, H, *]`.
    """
    edges = [0, q.shape[1]] if bounds is None else bounds.tolist()
    sequences = q.shape[0] if bounds is None else len(edges) - 1
    start = q.new_zeros(sequences, *q.shape[2:], v.shape[-1])
    start = start if state is None else state.to(q.dtype)
    outputs, finals = [], []
    for n, (first, last) in enumerate(pairwise(edges)):
        S = start if bounds is None else start[n : n + 1]
        for t in range(first, last):
            removed = b[:, t, :, :, None] * (a[:, t, :, :, None] * S).sum(-2, keepdim=True)
            written = k[:, t, :, :, None] * v[:, t, :, None]
            S = g[:, t, :, :, None].exp() * S + written + removed
            outputs.append((q[:, t, :, :, None] * S).sum(-2))
        finals.append(S)
    return torch.stack(outputs, 1), torch.cat(finals)
