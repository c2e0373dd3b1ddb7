"""Implementations of one function: compared with float64, then timed.

Inputs are tensors by name. Those of three or more dimensions are `[B, T, ...]`; the others are
shared by all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.engine.clocks import (
    copy_ms,
    eager_ms,
    free,
    graph_ms,
    peak_bytes,
    poison,
    rested_ms,
    states_in_turn,
)
from benchmarks.engine.results import Entry, Scalar
from quasar_kernels.reference import relative_rms

Inputs = dict[str, Tensor]
Function = Callable[[Inputs], Tensor]
"""Takes inputs and returns the output `[B, T, H, S]`."""
Step = Callable[[Inputs, Tensor], Any]
"""Takes inputs of one token and states `[B, H, S, S]`, which it may overwrite."""
Way = Literal["forward", "forward and backward"]
WAYS: tuple[Way, ...] = ("forward", "forward and backward")


class Shape(NamedTuple):
    """The shape of queries, keys and values."""

    batch: int
    tokens: int
    heads: int
    width: int

    def __str__(self) -> str:
        return " x ".join(f"{n:,}" for n in self)


def shape_of(of: Mapping[str, Any]) -> Shape:
    """Return the shape that an entry names."""
    return Shape(*(of[name] for name in Shape._fields))


def in_float64(x: Inputs) -> Inputs:
    return {name: t.double() for name, t in x.items()}


def part(x: Inputs, tokens: int, sequences: int | None = None) -> Inputs:
    """Return the inputs of the first tokens of the first sequences."""
    return {name: t[:sequences, :tokens] if t.ndim > 2 else t for name, t in x.items()}


def gradients(
    function: Function, x: Inputs, do: Tensor, parameters: Sequence[Tensor] = ()
) -> dict[str, Tensor]:
    """Run forward and backward; return the gradients of all inputs, by name.

    Args:
        parameters: tensors whose gradients are computed too.
    """
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    with torch.enable_grad():
        o = function(leaves)
        grads = torch.autograd.grad(o, [*leaves.values(), *parameters], do.to(o.dtype))
    return dict(zip(leaves, grads, strict=False))


def results(
    function: Function, way: Way, x: Inputs, do: Tensor, parameters: Sequence[Tensor] = ()
) -> dict[str, Tensor]:
    """Return the results of a call by tensor: the output, or the gradients as `gradients`."""
    return {"o": function(x)} if way == "forward" else gradients(function, x, do, parameters)


def timing(call: Callable[[], object], rested: bool = False) -> dict[str, float]:
    """Time a call as a graph and eagerly, and with `rested` also from rest."""
    from_rest = {"rested_ms": rested_ms(call)} if rested else {}
    return {"graph_ms": graph_ms(call), "eager_ms": eager_ms(call), **from_rest}


class Comparison(NamedTuple):
    """The comparison of one function's implementations."""

    select: Callable[[str], AbstractContextManager[Function]]  # by name
    exact: Function  # in the inputs' dtype, float64
    checked_tokens: Mapping[Way, int]  # of the first sequence, compared with `exact`
    time: Callable[..., dict[str, float]] = timing
    peak: bool = False  # whether to measure the memory of a call

    def entries(
        self,
        of: Mapping[str, Scalar],
        x: Inputs,
        do: Tensor,
        names: Sequence[str],
        rested: Collection[str] = (),
    ) -> Iterator[Entry]:
        """Compare one call with float64, check that two runs are bit-identical, and time it.

        Args:
            of: the call's name as entries have it, with its `way`.
            do: gradient of the output.
            rested: which implementations are timed from rest, too.
        """
        way: Any = of["way"]
        tokens = self.checked_tokens[way]
        few, d = part(x, tokens, 1), do[:1, :tokens]
        expected = results(self.exact, way, in_float64(few), d)
        entry = partial(Entry, table="calls", of=dict(of))
        for name in names:
            try:
                with self.select(name) as function:
                    poison()
                    result, again = (results(function, way, few, d) for _ in range(2))
                    errors = {t: relative_rms(y, expected[t]) for t, y in result.items()}
                    same = all(torch.equal(y, again[t]) for t, y in result.items())
                    del result, again
                    call: Callable[[], object] = partial(function, x)
                    if way != "forward":
                        call = partial(gradients, function, x, do)
                    memory: dict[str, float] = {}
                    if self.peak:
                        call()
                        inputs = torch.cuda.memory_allocated()
                        memory["peak_bytes"] = inputs + peak_bytes(call)
                    times = self.time(call, name in rested)
                    del call
                figures = {**times, **memory, "repeats": same}
                yield entry(by=name, figures=figures, errors=errors)
            except Exception as error:  # an unsupported call, or too little memory
                yield entry(by=name, failure=f"{type(error).__name__}: {error}")
            free()


def decoding(
    of: Mapping[str, Scalar],
    x: Inputs,
    state: Tensor,
    steps: Mapping[str, Step],
    errors: Mapping[str, dict[str, float]] | None = None,
) -> Iterator[Entry]:
    """Time one token for each implementation, alternating between many states, and copies of them.

    Args:
        steps: by implementation.
        errors: of the output, by implementation and tensor.
    """
    sets = states_in_turn(state.nbytes)
    states = [state.clone() for _ in range(sets)]
    targets = [torch.empty_like(state) for _ in range(sets)]
    entry = partial(
        Entry, table="decoding", of={**of, "state_bytes": 4 * state.numel(), "sets": sets}
    )
    for name, step in steps.items():
        turns = [partial(step, x, s) for s in states]
        times: dict[str, float] = {"graph_ms": graph_ms(turns), "eager_ms": eager_ms(turns)}
        yield entry(by=name, figures=times, errors=(errors or {}).get(name, {}))
    yield entry(by="copy", figures={"graph_ms": copy_ms(states, targets)})
