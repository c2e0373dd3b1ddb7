"""Measures several lengths, several cold processes each, and keeps going where one fails."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.report import Failure, GateResult, Measurement
from harness.runner import MeasurementError, check, measure
from harness.workload import WORKLOAD

Progress = Callable[[str, int, str], None]
"""Called with `gate`, `run`, `failed` or `log`, the length in tokens, and a text for a person."""


@dataclass
class Sweep:
    """Measurements by length, in the order of the runs, and the lengths that gave none."""

    runs: dict[int, list[Measurement]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def measurements(self) -> list[Measurement]:
        """All measurements, shortest length first."""
        return [m for length in sorted(self.runs) for m in self.runs[length]]


def _silent(event: str, length: int, text: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class _Plan:
    """What stays the same for every length."""

    tree: Path
    runs: int
    device: str
    gated: bool
    cold_cache: bool
    timeout: float
    scratch: Path
    stop: threading.Event | None
    progress: Progress

    def measure(self, length: int) -> list[Measurement]:
        """Gate `length` once, then run it in fresh processes."""
        gate = self._gate(length) if self.gated else False
        measurements: list[Measurement] = []
        for number in range(1, self.runs + 1):
            found = measure(
                self.tree,
                length,
                device=self.device,
                gate=gate,
                timeout=self.timeout,
                scratch=self.scratch,
                stop=self.stop,
                cold_cache=self.cold_cache and number == 1,
            )
            measurements.append(found)
            speed = f"{found.tokens_per_sec:,.0f} tokens/s"
            self.progress("run", length, f"{number} of {self.runs}: {speed}")
        return measurements

    def _gate(self, length: int) -> GateResult:
        gate = check(
            self.tree,
            length,
            device=self.device,
            timeout=self.timeout,
            scratch=self.scratch,
            stop=self.stop,
        )
        colour = "green" if gate.passed else "red"
        text = f"{colour}, {len(gate.checks)} checks in {gate.seconds:.1f} s"
        self.progress("gate", length, text)
        return gate


def sweep(
    tree: Path,
    lengths: Sequence[int],
    *,
    runs: int,
    device: str = "auto",
    gated: bool = True,
    cold_cache: bool = False,
    timeout: float = WORKLOAD.timeout_seconds,
    stop: threading.Event | None = None,
    progress: Progress = _silent,
) -> Sweep:
    """Measure `tree` at each length in `runs` fresh processes, after one gate per length.

    A length that fails gives a `Failure` and no further runs of it; the runs that it had are
    dropped, since a length that works only at times must not be claimed. Lengths longer than
    one that ran out of memory are not tried.

    Args:
        cold_cache: the first run of each length starts with empty kernel caches.

    Raises:
        MeasurementError: stopped on request, or this Python lacks a module that the tree imports.
        ValueError: `runs` is not positive.
    """
    if runs < 1:
        raise ValueError(f"runs {runs} must be at least 1")
    result = Sweep()
    too_long: int | None = None
    with tempfile.TemporaryDirectory(prefix="harness-", ignore_cleanup_errors=True) as folder:
        plan = _Plan(tree, runs, device, gated, cold_cache, timeout, Path(folder), stop, progress)
        for length in sorted(set(lengths)):
            if too_long is not None:
                reason = f"not tried: {too_long} tokens ran out of memory"
                failure = Failure(length=length, kind="out_of_memory", reason=reason)
            else:
                try:
                    result.runs[length] = plan.measure(length)
                    continue
                except MeasurementError as error:
                    if error.kind in ("stopped", "import"):  # no other length would do better
                        raise
                    failure = Failure(length=length, kind=error.kind, reason=error.reason)
                    if error.log_tail and error.kind != "gate":
                        progress("log", length, error.log_tail[-2000:])
                    too_long = length if error.kind == "out_of_memory" else None
            result.failures.append(failure)
            progress("failed", length, f"{failure.kind}: {failure.reason}")
    return result
