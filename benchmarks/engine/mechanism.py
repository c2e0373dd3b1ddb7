"""A mechanism of the comparison: inputs, float64 results, and implementations' calls.

Tensors of three or more dimensions are `[B, T, ...]`; the others are shared by all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.engine.comparison import Exact, Inputs, Shape, Step
from quasar_kernels.decay_reference import run_recurrence

OURS, FLA = "quasar_kernels", "fla-core"
"""Sources of the implementations."""
HEADS, WIDTH = 8, 64
NONE: Mapping[str, Any] = MappingProxyType({})
SLOWEST, FASTEST = 1e-3, 1e-1
"""Bounds of step sizes, which are log-uniform between them, as in Mamba-2's initialisation."""


class Bounds(NamedTuple):
    """The bounds of packed sequences, `[N + 1]` int64."""

    here: Tensor  # on the tensors' device
    host: Tensor


Chunks = Callable[[Inputs, Bounds | None], Tensor]


class Calls(NamedTuple):
    """The functions that draw an implementation's inputs and call it."""

    draw: Callable[[int, int], Inputs]  # arguments: numbers of sequences and of tokens
    exact: Exact
    chunks: Chunks  # returns o of whole sequences
    step: Step  # returns o of one token from states, which it may overwrite
    state: Callable[[int], Any]  # draws the states of so many sequences
    # least floating-point operations of a forward pass's products over sequences of these lengths
    operations: Callable[[list[int]], float] = lambda _: 0.0
    parameters: tuple[Tensor, ...] = ()  # further tensors that need gradients
    like: str = "v"  # the input that has the output's shape and dtype
    changes_state: bool = True  # whether a step writes the state, besides reading it
    backward_operations: float = 2  # the backward pass's, over the forward pass's


class Implementation(NamedTuple):
    """One line of the comparison."""

    mechanism: str
    by: str  # source of the implementation
    make: Callable[[str], Calls]  # for a device; imports the implementation
    power: int = 1  # its time grows with this power of the tokens


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


def functions(
    draw: Callable[[Shape, str], Inputs],
    exact: Exact,
    name: str,
    module: str = "",
    keep: str = "output_final_state",
    chunk_options: Mapping[str, Any] = NONE,
    **options: Any,
) -> Callable[[str], Calls]:
    """Return a `make` for the functions `chunk_NAME` and `fused_recurrent_NAME`.

    Both take the inputs by name.

    Args:
        name: NAME, which is also the name of fla's module.
        module: the functions' module, if it is not fla's.
        keep: the option with which the recurrent function returns the final state.
        chunk_options: further options of the chunk function.
        options: of both functions.
    """

    def make(device: str) -> Calls:
        names = (f"chunk_{name}", f"fused_recurrent_{name}")
        chunk, recurrent = imported(module or f"fla.ops.{name}", *names)

        def chunks(x: Inputs, bounds: Bounds | None) -> Tensor:
            o: Tensor = chunk(**x, **options, **chunk_options, **packed(bounds))[0]
            return o

        def step(x: Inputs, state: Tensor) -> Tensor:
            o: Tensor = recurrent(**x, **options, initial_state=state, **{keep: True})[0]
            return o

        return calls(draw, exact, device, chunks=chunks, step=step)

    return make


def noise(shape: Shape, device: str) -> Tensor:
    """Draw `[B, T, H, S]` fp32."""
    return torch.randn(*shape, device=device)


def steps(heads: int, device: str) -> Tensor:
    """Draw log-uniform step sizes `[H]` in fp32."""
    low, high = (torch.tensor(x).log10() for x in (SLOWEST, FASTEST))
    return 10 ** torch.empty(heads, device=device).uniform_(float(low), float(high))


def recurrence(
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

    Tensors are `[B, T, H, *]`; their dtype is that of the arithmetic.
    """

    def step(n: int, S: Tensor) -> tuple[Tensor, Tensor]:
        removed = b[:, n, :, :, None] * (a[:, n, :, :, None] * S).sum(-2, keepdim=True)
        written = k[:, n, :, :, None] * v[:, n, :, None]
        S = g[:, n, :, :, None].exp() * S + written + removed
        return (q[:, n, :, :, None] * S).sum(-2), S

    return run_recurrence(step, q.shape, v.shape[-1], state, bounds, q)
