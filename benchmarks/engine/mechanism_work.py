"""The cost of a mechanism's implementation: each length is compared with float64, then timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import clocks
from benchmarks.engine.comparison import WAYS, Inputs, Way, in_float64, part, results
from benchmarks.engine.mechanism import Bounds, Calls
from benchmarks.engine.results import Entry
from quasar_kernels.reference import relative_rms

PACKED_TOKENS = 65_536
PACKED_LENGTHS = (131, 369, 524, 1021, 1027, 2047, 3017, 4095, 5121, 8193, 9999, 13_609)
"""Lengths of packed sequences; the last one gets the remaining tokens. Three lie within the checked
tokens."""
CHECKED_TOKENS = 1024
DECODED_BATCH = 64
LONGEST_MS = 1000.0
"""A call that would take longer is omitted."""
GRAPH_MS = 15.0
"""Longest call that is replayed as a CUDA graph. The host does not limit longer calls."""
ERROR = 0.1
"""Relative RMS error from which an implementation counts as wrong and is not timed."""


class Wrong(Exception):
    """A result is not finite, or too far from float64."""


def packed_bounds(tokens: int, device: str) -> Bounds:
    """Return bounds of sequences of mixed lengths that fill a row."""
    edges = [0]
    for length in PACKED_LENGTHS:
        if edges[-1] + length < tokens:
            edges.append(edges[-1] + length)
    host = torch.tensor([*edges, tokens])
    return Bounds(host.to(device), host)


def size(x: Inputs) -> int:
    """Return the bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in x.values())


class Work:
    """An implementation with the inputs of its longest call, and its expected results."""

    def __init__(self, name: str, calls: Calls, tokens: int, device: str) -> None:
        self.name, self.calls, self.device = name, calls, device
        self.on_gpu = device == "cuda"
        torch.manual_seed(0)
        self.x = calls.draw(1, tokens)
        self.d = torch.randn_like(self.x[calls.like])
        self._expected: dict[tuple[Way, int, bool], dict[str, Tensor]] = {}

    def results(
        self, way: Way, x: Inputs, d: Tensor, bounds: Bounds | None = None
    ) -> dict[str, Tensor]:
        """Run a call; return the output, or the gradients of the inputs, by name."""
        calls = self.calls
        with torch.no_grad():
            return results(lambda y: calls.chunks(y, bounds), way, x, d, calls.parameters)

    def expected(self, way: Way, tokens: int, packed: bool) -> dict[str, Tensor]:
        """Return a call's float64 results over its first tokens, from their inputs only."""
        key = (way, tokens, packed)
        if key not in self._expected:
            x, d, bounds = in_float64(part(self.x, tokens)), self.d[:, :tokens].double(), None
            if packed:
                edges = packed_bounds(PACKED_TOKENS, "cpu").host
                bounds = torch.cat([edges[edges < tokens], torch.tensor([tokens])])
            with torch.no_grad():
                found = results(lambda y: self.calls.exact(y, None, bounds)[0], way, x, d)
            self._expected[key] = found
        return self._expected[key]

    def errors(self, way: Way, tokens: int, bounds: Bounds | None = None) -> dict[str, float]:
        """Compare a call with float64 over its first tokens.

        Gradients are those of a loss over these tokens; later tokens must not change them.

        Raises:
            Wrong: an error is too large, or any element of a result is not finite.
        """
        clocks.poison()
        first = min(tokens, CHECKED_TOKENS)
        d = self.d[:, :tokens].clone()
        d[:, first:] = 0
        result = self.results(way, part(self.x, tokens), d, bounds)
        del d
        return compared(part(result, first), self.expected(way, first, bounds is not None), result)

    def entry(self, way: Way, tokens: int, bounds: Bounds | None = None) -> Entry:
        """Compare a call of whole sequences with float64, and time it.

        Raises:
            Wrong: as `errors`.
            torch.OutOfMemoryError: there is too little memory for the call.
        """
        errors = self.errors(way, tokens, bounds)
        x, d = part(self.x, tokens), self.d[:, :tokens]
        lengths = [tokens] if bounds is None else bounds.host.diff().tolist()
        operations = self.calls.operations(lengths)
        read, returned = size(x) + sum(p.nbytes for p in self.calls.parameters), d.nbytes
        moved = read + returned
        call = partial(self.results, way, x, d, bounds)
        if way != "forward":
            moved += 2 * read + returned  # read again with the gradient, and gradients written
            operations *= 1 + self.calls.backward_operations
        ms, clock = timed(call, self.on_gpu, graphs=bounds is None)
        in_a_row = {}
        if bounds is None and tokens == PACKED_TOKENS:
            in_a_row = {"in_a_row_ms": timed(call, self.on_gpu, graphs=False)[0]}
        figures = {
            "ms": ms,
            **in_a_row,
            "peak_bytes": clocks.peak_bytes(call) + size(x),
            "moved_bytes": moved,
            "operations": operations,
        }
        of = call_of(way, tokens, packed=bounds is not None)
        return self._timed_entry(of, figures, errors, clock)

    def decoded(self, batch: int = DECODED_BATCH) -> Entry:
        """Compare one token with float64, and time it with alternating states."""
        step = self.calls.step
        x, state = self.calls.draw(batch, 1), self.calls.state(batch)
        expected = self.calls.exact(in_float64(x), state.double(), None)[0]
        with torch.no_grad():
            o = step(x, state.clone())
        errors = compared({"o": o}, {"o": expected}, {"o": o})
        del expected
        sets = clocks.states_in_turn(state.nbytes) if self.on_gpu else 1
        turns = [partial(step, x, state.clone()) for _ in range(sets)]
        with torch.no_grad():
            most = clocks.peak_bytes(turns[0]) + size(x) + state.nbytes
            ms, clock = timed(turns, self.on_gpu)
        moved = state.nbytes * (2 if self.calls.changes_state else 1) + size(x) + o.nbytes
        figures = {"ms": ms, "peak_bytes": most, "moved_bytes": moved, "operations": 0}
        return self._timed_entry(call_of("decoding", 1, batch), figures, errors, clock)

    def _timed_entry(
        self, of: dict[str, Any], figures: dict[str, float], errors: dict[str, float], clock: str
    ) -> Entry:
        texts = {"clock": clock}
        return Entry(
            table="calls", of=of, by=self.name, figures=figures, errors=errors, texts=texts
        )


def call_of(way: str, tokens: int, batch: int = 1, *, packed: bool = False) -> dict[str, Any]:
    """Return the key of a call in the results."""
    return {"way": way, "batch": batch, "tokens": tokens, "packed": packed}


def compared(
    result: dict[str, Tensor], expected: dict[str, Tensor], whole: dict[str, Tensor]
) -> dict[str, float]:
    """Return the relative RMS errors by tensor.

    Raises:
        Wrong: an error is too large, or an element of `whole` is not finite.
    """
    for name, t in whole.items():
        if not bool(t.isfinite().all()):
            raise Wrong(f"{name} is not finite everywhere")
    errors = {name: relative_rms(result[name], t) for name, t in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= ERROR:
        raise Wrong(f"the relative RMS error of {worst} is {errors[worst]:.2g}, over {ERROR:g}")
    return errors


def timed(
    calls: Callable[[], object] | Sequence[Callable[[], object]], on_gpu: bool, graphs: bool = True
) -> tuple[float, str]:
    """Return a call's median milliseconds and the clock: `graph`, `events` or the `host`'s."""
    several = calls if isinstance(calls, Sequence) else [calls]

    if not on_gpu:
        start = time.perf_counter()
        for call in several:
            call()
        return (time.perf_counter() - start) * 1e3 / len(several), "host"
    clocks.events_ms(several, 1)
    once = clocks.events_ms(several, 1)
    if graphs and once / len(several) <= GRAPH_MS:
        return clocks.graph_ms(several, repeats=5, warm=0.03), "graph"
    rounds = max(1, round(GRAPH_MS / once))
    times = [clocks.events_ms(several, rounds) for _ in range(3 if once > 100 else 5)]
    return median(times) / len(several), "events"


def entries(work: Work, power: int, lengths: Sequence[int]) -> Iterator[Entry]:
    """Measure everything; an entry without figures has the reason.

    Args:
        power: exponent of the growth of the time with the number of tokens.
    """
    for way in WAYS:
        last: Entry | None = None
        for tokens in lengths:
            due = 0.0
            if last is not None:
                due = last.figures["ms"] * (tokens / int(last.of["tokens"])) ** power
            of = call_of(way, tokens)
            if due > LONGEST_MS:
                limit = LONGEST_MS / 1e3
                why = f"it would take about {due / 1e3:.1f} s, and {limit:g} s is the limit"
                yield Entry(table="calls", of=of, by=work.name, failure=why)
                continue
            entry = attempt(work.name, of, partial(work.entry, way, tokens))
            last = last if entry.failure else entry
            yield entry
        if way == "forward":
            of = call_of("decoding", 1, DECODED_BATCH)
            yield attempt(work.name, of, work.decoded)
    for way in WAYS:
        tokens = min(PACKED_TOKENS, max(lengths))
        of = call_of(way, tokens, packed=True)
        if work.calls.no_packing:
            yield Entry(table="calls", of=of, by=work.name, failure=work.calls.no_packing)
            continue
        bounds = packed_bounds(tokens, work.device)
        yield attempt(work.name, of, partial(work.entry, way, tokens, bounds))


def attempt(name: str, of: dict[str, Any], make: Callable[[], Entry]) -> Entry:
    """Return an entry; without figures, it has the reason."""
    try:
        return make()
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except Wrong as error:
        reason = f"wrong: {error}"
    except Exception as error:  # a compiler or a launch failed; the other calls are still measured
        line = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {line}"[:200]
    finally:
        clocks.free()
    return Entry(table="calls", of=of, by=name, failure=reason)
