"""Compares implementations of one function with float64 at full length, then times them.

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
    poison,
    rested_ms,
    states_in_turn,
)
from benchmarks.engine.results import Entry, Scalar
from quasar_kernels.reference import relative_rms

Inputs = dict[str, Tensor]
Function = Callable[[Inputs], Tensor]
"""Takes inputs and returns the output `[B, T, H, S]`."""
Exact = Callable[[Inputs, Any, Tensor | None], tuple[Tensor, Any]]
"""Takes inputs in float64, a state or None, and bounds of packed sequences or None; returns o
`[B, T, H, V]` and the state after each sequence."""
Step = Callable[[Inputs, Any], Tensor]
"""Takes inputs of one token and states, which it may overwrite; returns the output."""
Way = Literal["forward", "forward and backward"]
WAYS: tuple[Way, ...] = ("forward", "forward and backward")
ERROR = 0.1
"""Relative RMS error from which an implementation counts as wrong and is not timed."""
CHECKED = """\
Before a call is timed, it runs twice at its full length, with NaN in free memory. Every element \
must be finite, and no error above 0.1; the file says whether both runs have the same bits."""
"""The text for protocols with `checked`."""


class Wrong(Exception):
    """A result is not finite, or too far from float64."""


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
        parameters: further tensors that get gradients.
    """
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    with torch.enable_grad():
        o = function(leaves)
        grads = torch.autograd.grad(o, [*leaves.values(), *parameters], do.to(o.dtype))
    return dict(zip(leaves, grads, strict=False))


@torch.no_grad()
def results(
    function: Function, way: Way, x: Inputs, do: Tensor, parameters: Sequence[Tensor] = ()
) -> dict[str, Tensor]:
    """Return a call's results by name: the output o, or the gradients of `gradients`."""
    return {"o": function(x)} if way == "forward" else gradients(function, x, do, parameters)


def only_first(do: Tensor, tokens: int) -> Tensor:
    """Return the output's gradient for a loss over the first tokens of the first sequence."""
    first = torch.zeros_like(do)
    first[:1, :tokens] = do[:1, :tokens]
    return first


class Checked(NamedTuple):
    """The result of `checked`."""

    errors: dict[str, float]  # relative RMS by tensor
    repeats: bool  # whether a second call gave the same bits


def checked(
    call: Callable[[], dict[str, Tensor]],
    expected: Mapping[str, Tensor],
    compare: Callable[[Tensor, Tensor, str], dict[str, float]] = (
        lambda result, exact, name: {name: relative_rms(result, exact)}
    ),
) -> Checked:
    """Run a call twice, with NaN in free memory, and compare its results with the expected ones.

    Args:
        call: returns results by name.
        expected: the results in float64, in full or for the first sequences and tokens.

    Raises:
        Wrong: an error is too large, or any element of a result is not finite.
    """
    poison()
    result = call()
    for name, t in result.items():
        if not bool(t.isfinite().all()):
            raise Wrong(f"{name} is not finite everywhere")
    errors: dict[str, float] = {}
    for name, t in expected.items():
        errors |= compare(result[name][tuple(map(slice, t.shape))], t, name)
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= ERROR:
        raise Wrong(f"the relative RMS error of {worst} is {errors[worst]:.2g}, over {ERROR:g}")
    poison()
    again = call()
    return Checked(errors, all(torch.equal(t, again[name]) for name, t in result.items()))


def attempt(entry: Callable[..., Entry], make: Callable[[], Mapping[str, Any]]) -> Entry:
    """Return the entry with the results of `make`, or with the reason why there are none."""
    try:
        return entry(**make())
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except Wrong as error:
        reason = f"wrong: {error}"
    except Exception as error:  # a compiler or a launch failed; the other calls are still measured
        line = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {line}"[:200]
    finally:
        free()
    return entry(failure=reason)


def timing(call: Callable[[], object], rested: bool = False) -> dict[str, float]:
    """Time a call as a graph and eagerly, and with `rested` also from rest."""
    from_rest = {"rested_ms": rested_ms(call)} if rested else {}
    return {"graph_ms": graph_ms(call), "eager_ms": eager_ms(call), **from_rest}


class Comparison(NamedTuple):
    """The comparison of one function's implementations."""

    select: Callable[[str], AbstractContextManager[Function]]  # by name
    exact: Exact
    checked_tokens: Mapping[Way, int]  # of the first sequence, compared with `exact`
    time: Callable[..., dict[str, float]] = timing

    def entries(
        self,
        of: Mapping[str, Scalar],
        way: Way,
        x: Inputs,
        do: Tensor,
        names: Sequence[str],
        rested: Collection[str] = (),
    ) -> Iterator[Entry]:
        """Check one call by each implementation, and time it.

        Args:
            of: the entries' key of the call.
            do: gradient of the output.
            rested: the implementations that are also timed from rest.
        """
        tokens = self.checked_tokens[way]
        first = in_float64(part(x, tokens, 1))
        expected = results(lambda y: self.exact(y, None, None)[0], way, first, do[:1, :tokens])
        one_loss = only_first(do, tokens)

        @torch.no_grad()
        def measured(name: str) -> dict[str, Any]:
            with self.select(name) as function:
                errors, repeats = checked(partial(results, function, way, x, one_loss), expected)
                call: Callable[[], object] = partial(function, x)  # without the engine's own work
                if way != "forward":
                    call = partial(gradients, function, x, do)
                figures = {**self.time(call, name in rested), "repeats": repeats}
            return {"figures": figures, "errors": errors}

        for name in names:
            entry = partial(Entry, table="calls", of=dict(of), by=name)
            yield attempt(entry, partial(measured, name))


@torch.no_grad()
def decoding(
    of: Mapping[str, Scalar], x: Inputs, state: Tensor, steps: Mapping[str, Step], exact: Exact
) -> Iterator[Entry]:
    """Check one token by each implementation; time it, and copies, with many states in turn.

    Args:
        steps: by implementation.
    """
    sets = states_in_turn(state.nbytes)
    expected = {"o": exact(in_float64(x), state.double(), None)[0]}

    def measured(step: Step) -> dict[str, Any]:
        errors, repeats = checked(lambda: {"o": step(x, state.clone())}, expected)
        turns = [partial(step, x, state.clone()) for _ in range(sets)]
        times: dict[str, float] = {"graph_ms": graph_ms(turns), "eager_ms": eager_ms(turns)}
        return {"figures": {**times, "repeats": repeats}, "errors": errors}

    of = {**of, "state_bytes": 4 * state.numel(), "sets": sets}
    entry = partial(Entry, table="decoding", of=of)
    for name, step in steps.items():
        yield attempt(partial(entry, by=name), partial(measured, step))
    sources, targets = ([state.clone() for _ in range(sets)] for _ in range(2))
    yield entry(by="copy", figures={"graph_ms": copy_ms(sources, targets)})
