"""What one implementation costs: every length compared with float64, then timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.engine import clocks
from benchmarks.mechanisms.calls import PACKED_TOKENS, Bounds, Implementation, packed_bounds
from benchmarks.mechanisms.inputs import Inputs, part, wide
from benchmarks.mechanisms.names import ENTRIES
from benchmarks.mechanisms.results import ERROR, Clock, Missing, Row, Way
from quasar_kernels.reference import relative_rms

CHECKED_TOKENS = 1024
DECODED_BATCH = 64
LONGEST_MS = 1000.0
"""A call that would take longer is left out."""
GRAPH_MS = 15.0
"""Calls up to here are replayed as CUDA graphs; the host is no matter beyond."""
TUNED_TOKENS = 16_384
"""The length at which a library's autotuner chooses."""
NOT_REACHED = "not reached within the limit"


def size(x: Inputs) -> int:
    """Return the bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in x.values())


class Wrong(Exception):
    """A result is not finite, or too far from float64."""


class Work:
    """An implementation with the inputs of its longest call, and what its results must be."""

    def __init__(self, name: str, made: Implementation, tokens: int, device: str) -> None:
        self.name, self.made, self.device = name, made, device
        self.on_gpu = device == "cuda"
        torch.manual_seed(0)
        self.x = made.draw(1, tokens)
        # no call tells the shape: a library's autotuner would choose by it
        self.d = torch.randn_like(self.x[made.like])
        self._expected: dict[tuple[Way, int, bool], dict[str, Tensor]] = {}

    def outputs(self, x: Inputs, bounds: Bounds | None = None) -> Tensor:
        """Run a forward pass."""
        with torch.no_grad():
            return self.made.chunks(x, bounds)

    def gradients(self, x: Inputs, d: Tensor, bounds: Bounds | None = None) -> dict[str, Tensor]:
        """Run forward and backward; return the gradients of the inputs, by name."""
        leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
        wanted = [*leaves.values(), *self.made.parameters]
        with torch.enable_grad():
            o = self.made.chunks(leaves, bounds)
            found = torch.autograd.grad(o, wanted, d.to(o.dtype))
        return dict(zip(leaves, found, strict=False))

    def expected(self, way: Way, tokens: int, packed: bool) -> dict[str, Tensor]:
        """Return a call's results over its first tokens, from inputs of these alone, in float64."""
        key = (way, tokens, packed)
        if key not in self._expected:
            x = wide(part(self.x, tokens))
            bounds = packed_bounds(PACKED_TOKENS, "cpu").host if packed else None
            if bounds is not None:
                bounds = torch.cat([bounds[bounds < tokens], torch.tensor([tokens])])
            if way == "forward":
                with torch.no_grad():
                    self._expected[key] = {"o": self.made.exact(x, None, bounds)[0]}
            else:
                leaves = {name: t.requires_grad_() for name, t in x.items()}
                with torch.enable_grad():
                    o = self.made.exact(leaves, None, bounds)[0]
                    found = torch.autograd.grad(
                        o, list(leaves.values()), self.d[:, :tokens].double()
                    )
                self._expected[key] = dict(zip(leaves, found, strict=True))
        return self._expected[key]

    def errors(self, way: Way, tokens: int, bounds: Bounds | None = None) -> dict[str, float]:
        """Compare a call with float64 over its first tokens.

        Gradients are those of a loss over these, which later tokens must not change.

        Raises:
            Wrong: the error is too large, or something anywhere is not finite.
        """
        if self.on_gpu:
            clocks.poison()
        first = min(tokens, CHECKED_TOKENS)
        x = part(self.x, tokens)
        if way == "forward":
            found = {"o": self.outputs(x, bounds)}
        else:
            d = self.d[:, :tokens].clone()
            d[:, first:] = 0
            found = self.gradients(x, d, bounds)
        return compared(part(found, first), self.expected(way, first, bounds is not None), found)

    def row(self, way: Way, tokens: int, bounds: Bounds | None = None) -> Row:
        """Compare a call of whole sequences with float64, and time it.

        Raises:
            Wrong: as `errors`.
            torch.OutOfMemoryError: there is too little memory for it.
        """
        errors = self.errors(way, tokens, bounds)
        x, d = part(self.x, tokens), self.d[:, :tokens]
        lengths = [tokens] if bounds is None else bounds.host.diff().tolist()
        operations = self.made.operations(lengths)
        given, returned = size(x) + sum(p.nbytes for p in self.made.parameters), d.nbytes
        moved = given + returned
        call: Callable[[], object] = partial(self.outputs, x, bounds)
        if way != "forward":
            call = partial(self.gradients, x, d, bounds)
            moved += 2 * given + returned  # read again with the gradient, and gradients written
            operations *= 1 + self.made.backward_operations
        ms, clock = timed(call, self.on_gpu, graphs=bounds is None)
        beside = bounds is None and tokens == PACKED_TOKENS
        in_a_row = timed(call, self.on_gpu, graphs=False)[0] if beside else None
        return Row(
            name=self.name, way=way, batch=1, tokens=tokens, packed=bounds is not None,
            ms=ms, clock=clock, in_a_row_ms=in_a_row, peak_bytes=peak(call, self.on_gpu) + size(x),
            moved_bytes=moved, operations=operations, errors=errors,
        )  # fmt: skip

    def decoded(self, batch: int = DECODED_BATCH) -> Row:
        """Compare one token with float64, and time it, its states taken in turn."""
        step = self.made.step
        x, state = self.made.draw(batch, 1), self.made.state(batch)
        expected = self.made.exact(wide(x), state.double(), None)[0]
        with torch.no_grad():
            o = step(x, state.clone())
        errors = compared({"o": o}, {"o": expected}, {"o": o})
        del expected
        copies = [
            state.clone() for _ in range(clocks.states_in_turn(state.nbytes) if self.on_gpu else 1)
        ]
        calls = [partial(step, x, s) for s in copies]
        with torch.no_grad():
            most = peak(calls[0], self.on_gpu) + size(x) + state.nbytes
            ms, clock = timed(calls, self.on_gpu)
        moved = state.nbytes * (2 if self.made.changes_state else 1) + size(x) + o.nbytes
        return Row(
            name=self.name, way="decoding", batch=batch, tokens=1, ms=ms, clock=clock,
            peak_bytes=most, moved_bytes=moved, errors=errors,
        )  # fmt: skip


def compared(
    found: dict[str, Tensor], expected: dict[str, Tensor], whole: dict[str, Tensor]
) -> dict[str, float]:
    """Return the relative RMS errors by tensor.

    Raises:
        Wrong: one is too large, or `whole` is not finite somewhere.
    """
    for name, t in whole.items():
        if not bool(t.isfinite().all()):
            raise Wrong(f"{name} is not finite everywhere")
    errors = {name: relative_rms(found[name], t) for name, t in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= ERROR:
        raise Wrong(f"the relative RMS error of {worst} is {errors[worst]:.2g}, over {ERROR:g}")
    return errors


def peak(call: Callable[[], object], on_gpu: bool) -> int:
    """Return the most bytes that a call allocates beside what there is; 0 on a CPU."""
    if not on_gpu:
        return 0
    clocks.free()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def timed(
    calls: Callable[[], object] | Sequence[Callable[[], object]], on_gpu: bool, graphs: bool = True
) -> tuple[float, Clock]:
    """Return a call's median milliseconds and the clock that took it."""
    several = calls if isinstance(calls, Sequence) else [calls]

    def loop(times: int) -> float:
        if not on_gpu:
            start = time.perf_counter()
            for _ in range(times):
                for call in several:
                    call()
            return (time.perf_counter() - start) * 1e3 / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(times):
            for call in several:
                call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / times

    once = loop(1)
    if not on_gpu:
        return once / len(several), "host"
    once = loop(1)
    if graphs and once / len(several) <= GRAPH_MS:
        return clocks.graph_ms(several, repeats=5, warm=0.03), "graph"
    times = max(1, round(GRAPH_MS / once))
    return median(loop(times) for _ in range(3 if once > 100 else 5)) / len(several), "events"


def first_calls(work: Work, lengths: Sequence[int]) -> Iterator[Callable[[], object]]:
    """Yield calls of every kind but packed ones, for what compiles or chooses at the first."""
    for tokens in lengths:
        x = part(work.x, tokens)
        yield partial(work.outputs, x)
        yield partial(work.gradients, x, work.d[:, :tokens])
    step = torch.no_grad()(work.made.step)
    yield partial(step, work.made.draw(DECODED_BATCH, 1), work.made.state(DECODED_BATCH))


def first_packed_calls(work: Work) -> Iterator[Callable[[], object]]:
    """Yield calls over packed sequences, as long as they are measured."""
    if not work.made.packs:
        bounds = packed_bounds(PACKED_TOKENS, work.device)
        yield partial(work.outputs, work.x, bounds)
        yield partial(work.gradients, work.x, work.d, bounds)


def rows(work: Work, lengths: Sequence[int], left: Callable[[], float]) -> Iterator[Row | Missing]:
    """Measure everything, and say of everything else why it is not there.

    Args:
        left: says how many seconds there are left.
    """
    ways: tuple[Way, ...] = ("forward", "forward and backward")
    missing = partial(Missing, name=work.name)
    for way in ways:
        last: Row | None = None
        for tokens in lengths:
            power = ENTRIES[work.name].power
            due = 0.0 if last is None else last.ms * (tokens / last.tokens) ** power
            if due > LONGEST_MS:
                limit = LONGEST_MS / 1e3
                why = f"it would take about {due / 1e3:.1f} s, and {limit:g} s is the limit"
                yield missing(reason=why, way=way, tokens=tokens)
                continue
            unmade = missing(reason="", way=way, tokens=tokens)
            found = attempt(unmade, left, partial(work.row, way, tokens))
            last = found if isinstance(found, Row) else last
            yield found
        if way == "forward":
            one = missing(reason="", way="decoding", tokens=1)
            yield attempt(one, left, work.decoded)
    for way in ways:
        tokens = min(PACKED_TOKENS, max(lengths))
        unmade = missing(reason=work.made.packs, way=way, tokens=tokens, packed=True)
        if work.made.packs:
            yield unmade
            continue
        bounds = packed_bounds(tokens, work.device)
        yield attempt(unmade, left, partial(work.row, way, tokens, bounds))


def attempt(unmade: Missing, left: Callable[[], float], make: Callable[[], Row]) -> Row | Missing:
    """Return a row, or `unmade` with the reason why there is none."""
    try:
        if left() <= 0:
            return unmade.model_copy(update={"reason": NOT_REACHED})
        return make()
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except Wrong as error:
        reason = f"wrong: {error}"
    except Exception as error:  # a compiler's, a launch's: the others are measured all the same
        reason = said(error)
    finally:
        if torch.cuda.is_available():
            clocks.free()
    return unmade.model_copy(update={"reason": reason})


def said(error: BaseException) -> str:
    """Return an error's kind and first line, short enough for a table."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"[:200]
