"""The cost of a mechanism's implementation over lengths, packed sequences and decoded tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import clocks
from benchmarks.engine.comparison import (
    WAYS,
    Checked,
    Inputs,
    Way,
    attempt,
    checked,
    in_float64,
    only_first,
    part,
    results,
)
from benchmarks.engine.mechanism import Bounds, Calls
from benchmarks.engine.results import Entry

PACKED_TOKENS = 65_536
PACKED_LENGTHS = (131, 369, 524, 1021, 1027, 2047, 3017, 4095, 5121, 8193, 9999, 13_609)
"""Lengths of packed sequences; a further one gets the remaining tokens. The checked tokens are in
the first three."""
CHECKED_TOKENS = 1024
DECODED_BATCH = 64
LONGEST_MS = 1000.0
"""A call that would take longer is omitted."""
GRAPH_MS = 15.0
"""Longest call that is replayed as a CUDA graph; longer ones do not wait for the host anyway."""


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
        return results(lambda y: calls.chunks(y, bounds), way, x, d, calls.parameters)

    def expected(self, way: Way, tokens: int, packed: bool) -> dict[str, Tensor]:
        """Return the float64 results of a call over only its first tokens."""
        key = (way, tokens, packed)
        if key not in self._expected:
            x, d, bounds = in_float64(part(self.x, tokens)), self.d[:, :tokens].double(), None
            if packed:
                edges = packed_bounds(PACKED_TOKENS, "cpu").host
                bounds = torch.cat([edges[edges < tokens], torch.tensor([tokens])])
            exact = self.calls.exact
            self._expected[key] = results(lambda y: exact(y, None, bounds)[0], way, x, d)
        return self._expected[key]

    def checked(self, way: Way, tokens: int, bounds: Bounds | None = None) -> Checked:
        """Compare a call with float64 over its first tokens.

        Gradients are those of a loss over these tokens; later tokens must not change them.

        Raises:
            Wrong: as `comparison.checked`.
        """
        first = min(tokens, CHECKED_TOKENS)
        x, d = part(self.x, tokens), only_first(self.d[:, :tokens], first)
        call = partial(self.results, way, x, d, bounds)
        return checked(call, self.expected(way, first, bounds is not None))

    def measured(self, way: Way, tokens: int, bounds: Bounds | None = None) -> dict[str, Any]:
        """Check a call of whole sequences, time it, and return the results for an entry.

        Raises:
            Wrong: as `checked`.
            torch.OutOfMemoryError: there is too little memory for the call.
        """
        found = self.checked(way, tokens, bounds)
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
        return measurement(figures, found, clock)

    @torch.no_grad()
    def decoded(self, batch: int = DECODED_BATCH) -> dict[str, Any]:
        """Check one token and time it with several states in turn; otherwise as `measured`."""
        step = self.calls.step
        x, state = self.calls.draw(batch, 1), self.calls.state(batch)
        expected = {"o": self.calls.exact(in_float64(x), state.double(), None)[0]}
        found = checked(lambda: {"o": step(x, state.clone())}, expected)
        sets = clocks.states_in_turn(state.nbytes) if self.on_gpu else 1
        turns = [partial(step, x, state.clone()) for _ in range(sets)]
        most = clocks.peak_bytes(turns[0]) + size(x) + state.nbytes
        ms, clock = timed(turns, self.on_gpu)
        moved = (
            state.nbytes * (2 if self.calls.changes_state else 1)
            + size(x)
            + x[self.calls.like].nbytes
        )
        figures = {"ms": ms, "peak_bytes": most, "moved_bytes": moved, "operations": 0}
        return measurement(figures, found, clock)


def measurement(figures: dict[str, float], found: Checked, clock: str) -> dict[str, Any]:
    """Return the fields of an entry."""
    figures = {**figures, "repeats": found.repeats}
    return {"figures": figures, "errors": found.errors, "texts": {"clock": clock}}


def timed(
    calls: Callable[[], object] | Sequence[Callable[[], object]], on_gpu: bool, graphs: bool = True
) -> tuple[float, str]:
    """Return a call's median milliseconds and the clock's name: `graph`, `events` or `host`."""
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
        power: as in `Implementation`.
    """

    def entry(way: str, tokens: int, batch: int = 1, *, packed: bool = False) -> partial[Entry]:
        of = {"way": way, "batch": batch, "tokens": tokens, "packed": packed}
        return partial(Entry, table="calls", of=of, by=work.name)

    for way in WAYS:
        last: Entry | None = None
        for tokens in lengths:
            due = 0.0
            if last is not None:
                due = last.figures["ms"] * (tokens / int(last.of["tokens"])) ** power
            if due > LONGEST_MS:
                limit = LONGEST_MS / 1e3
                why = f"it would take about {due / 1e3:.1f} s, and {limit:g} s is the limit"
                yield entry(way, tokens)(failure=why)
                continue
            found = attempt(entry(way, tokens), partial(work.measured, way, tokens))
            last = last if found.failure else found
            yield found
        if way == "forward":
            yield attempt(entry("decoding", 1, DECODED_BATCH), work.decoded)
    tokens = min(PACKED_TOKENS, max(lengths))
    bounds = packed_bounds(tokens, work.device)
    for way in WAYS:
        yield attempt(entry(way, tokens, packed=True), partial(work.measured, way, tokens, bounds))
