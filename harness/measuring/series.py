"""A series of measurements: lengths of one tree, each in cold processes, as a policy says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness.claim.rejection import rejection
from harness.measuring.runner import Measure, MeasurementError, measure
from harness.report import Failure, GateResult, Kind, Measurement
from harness.workload import WORKLOAD


@dataclass(frozen=True)
class Policy:
    """What a series takes at each length, and what a failure there means.

    Attributes:
        runs: fresh processes that a length takes.
        longest_first: start with the longest length, whose gate then stands for the shorter ones;
            else each length has its own gate, before its first run.
        gated: False measures unchecked code.
        cold: lengths whose first run starts with empty kernel caches.
        samples: how many are taken for one that counts (`claim.rejection`); 1 keeps what comes.
        cooling_seconds: the pause after a sample that does not count.
        repeated: kinds of failure after which a process is started a second time.
        left_out: kinds that cost a length its place and no more; the others end the series.
        too_long: those of `left_out` after which longer lengths are not tried either.
    """

    runs: int = 1
    longest_first: bool = False
    gated: bool = True
    cold: Container[int] = ()
    samples: int = 1
    cooling_seconds: float = 30.0
    repeated: frozenset[Kind] = frozenset()
    left_out: frozenset[Kind] = frozenset()
    too_long: frozenset[Kind] = frozenset()

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ValueError(f"runs {self.runs} must be at least 1")


@dataclass
class Series:
    """The measurements of one tree in the order in which they came, and the lengths without any.

    A subclass hears what happens through the methods that do nothing here.

    Attributes:
        device: `cuda`, `cpu` or `auto`.
        timeout: seconds for each process.
        stop: ends a process promptly when set.
        measure: `runner.measure` or its stand-in.
        wait: waits that many seconds.
    """

    tree: Path
    policy: Policy
    device: str = "auto"
    timeout: float = WORKLOAD.timeout_seconds
    stop: threading.Event | None = None
    measure: Measure = measure
    wait: Callable[[float], object] = time.sleep
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def of(self, length: int) -> list[Measurement]:
        """Return the runs of one length."""
        return [m for m in self.measurements if m.length == length]

    def run(self, lengths: Iterable[int]) -> None:
        """Bring each length to its runs; those that it has already count.

        A length that fails gives a `Failure`, and the runs that it had are dropped: one that works
        only at times must not be claimed.

        Raises:
            MeasurementError: a failure that ends the series. What it has stays.
        """
        for length in sorted(set(lengths), reverse=self.policy.longest_first):
            if any(failure.length == length for failure in self.failures):
                continue
            shorter = [f for f in self.failures if f.length < length]
            limit = next((f for f in shorter if f.kind in self.policy.too_long), None)
            if limit is not None:
                reason = f"not tried, as {limit.length} tokens failed: {limit.reason}"
                self.failures.append(Failure(length=length, kind=limit.kind, reason=reason))
            elif len(self.of(length)) < self.policy.runs:
                self.started(length)
                while len(self.of(length)) < self.policy.runs and self.take(length):
                    pass

    def take(self, length: int) -> bool:
        """Add one run of a length, or note why it has none; tell which.

        Calls for different lengths may be made at once.

        Raises:
            MeasurementError: a failure that ends the series.
        """
        try:
            measurement = self.sample(length)
        except MeasurementError as error:
            if error.kind not in self.policy.left_out:
                self.failed(length, error)
                raise
            for earlier in self.of(length):
                self.measurements.remove(earlier)
            self.failures.append(Failure(length=length, kind=error.kind, reason=error.reason))
            self.failed(length, error)
            return False
        self.measurements.append(measurement)
        self.measured(measurement)
        return True

    def sample(self, length: int) -> Measurement:
        """Return one more run of a length, which is not added to the series.

        Raises:
            MeasurementError: it failed, or (`disturbed`) no sample counts.
        """
        for number in range(1, self.policy.samples + 1):
            measurement = self._process(length)
            reason = rejection(measurement) if self.policy.samples > 1 else None
            if reason is None:
                return measurement
            self.disturbed(length, number, reason)
            if number < self.policy.samples:
                self.wait(self.policy.cooling_seconds)
        told = f"{self.policy.samples} samples at {length} tokens were disturbed: {reason}"
        raise MeasurementError(told, "disturbed")

    def started(self, length: int) -> None:
        """Hear that a length is measured now."""

    def measured(self, measurement: Measurement) -> None:
        """Hear of a run that was added."""

    def disturbed(self, length: int, number: int, reason: str) -> None:
        """Hear that the sample `number`, from 1, does not count."""

    def repeating(self, length: int, error: MeasurementError) -> None:
        """Hear that a process has failed and is started a second time."""

    def failed(self, length: int, error: MeasurementError) -> None:
        """Hear why a length is left out, or the series ended; another error may be raised."""

    def _process(self, length: int) -> Measurement:
        try:
            return self._measure_once(length)
        except MeasurementError as error:
            stopped = self.stop is not None and self.stop.is_set()
            if stopped or error.kind not in self.policy.repeated:
                raise
            self.repeating(length, error)
        return self._measure_once(length)

    def _measure_once(self, length: int) -> Measurement:
        return self.measure(
            self.tree,
            length,
            device=self.device,
            gate=self.gate_of(length),
            timeout=self.timeout,
            stop=self.stop,
            cold_cache=length in self.policy.cold and not self.of(length),
        )

    def gate_of(self, length: int) -> bool | GateResult:
        """Return the gate that stands for a length, or whether one has to run first.

        Raises:
            MeasurementError: there is none, and why.
        """
        if not self.policy.gated:
            return False
        checked = self.measurements if self.policy.longest_first else self.of(length)
        return next((m.gate for m in checked if m.gate), True)
