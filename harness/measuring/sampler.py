"""Takes the samples that a plan names: workers start together and are timed one by one."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.claim import is_settled
from harness.hardware.machine import Environment
from harness.measuring.plan import Plan
from harness.measuring.runner import (
    CheckTree,
    Measure,
    MeasurementError,
    Options,
    check,
    confirm,
    covers,
    measure,
    require_passed,
)
from harness.sample import Correctness, Failure, Kind, Sample, accepted, rejection

MAX_AT_ONCE, MIB_EACH = 14, 4096
"""Largest number of processes that import at the same time, each on one core, and the MiB of host
memory that each may need."""


def processes_at_once(machine: Environment) -> int:
    """Return how many processes may import at the same time on a machine."""
    room = MAX_AT_ONCE if machine.memory_mb is None else int(machine.memory_mb // MIB_EACH)
    return max(1, min(machine.usable_cpus or machine.cpu_count, room, MAX_AT_ONCE))


class Recorder:
    """Receives the events of a measurement; a subclass records the events that it needs.

    Events are delivered one at a time, some of them from other threads.
    """

    def planned(self, samples: Sequence[Sample], missing: Sequence[int]) -> None:
        """A round begins: the samples that count so far, and the missing ones by length."""

    def checked(self, correctness: Correctness) -> None:
        """A correctness check has passed."""

    def heated(self, result: object) -> None:
        """The GPU is warm; `result` is that of the heat soak."""

    def accepted(self, sample: Sample, number: int) -> None:
        """A sample counts, the `number`th of its length."""

    def rejected(self, sample: Sample, number: int, reason: str) -> None:
        """A sample does not count; it is the `number`th in a row for its length."""

    def failed(self, length: int, error: MeasurementError) -> None:
        """A length failed; the measurement continues without it."""

    def round_done(self, samples: Sequence[Sample], failures: Sequence[Failure]) -> None:
        """A round has ended: everything that was measured so far."""


COOLING_SECONDS = 30.0
"""Pause after a round with a rejected sample."""


@dataclass(frozen=True)
class Policy:
    """The conditions for a sample, and what happens after a failure."""

    checked: bool = True
    cold: Container[int] = ()  # the first sample of these lengths starts with empty kernel caches
    # the measurement ends after this many consecutive rejected samples of one length (see
    # `sample.rejection`); 1 means that all samples count
    attempts: int = 1
    # after a failure of these kinds, the measurement continues without that length and its samples;
    # other failures end it
    left_out: frozenset[Kind] = frozenset()


class _Stop(threading.Event):
    """An event that also counts as set while another event is set."""

    def __init__(self, other: threading.Event | None) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or (self._other is not None and self._other.is_set())


@dataclass(kw_only=True)
class Sampler:
    """Takes samples of one tree, and keeps them.

    Workers start in rounds. The workers of a round import together while the correctness check
    runs. Once it has passed, they are timed one after another. Rejected samples are kept, so that
    a claim can name them.
    """

    tree: Path
    options: Options
    policy: Policy = field(default_factory=Policy)
    recorder: Recorder = field(default_factory=Recorder)
    at_once: int = 1  # processes of one round
    # heats the GPU while the first round imports, because a cold GPU has higher clocks
    soak: Callable[[], object] | None = None
    measure: Measure = measure
    check: CheckTree = check
    wait: Callable[[float], object] = time.sleep
    # samples, failures: in the order of measurement
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    rounds: int = 0
    _rejected: Counter[int] = field(default_factory=Counter)  # consecutive ones, by length
    _disturbed: bool = False  # in this round
    _recording: threading.Lock = field(default_factory=threading.Lock)

    def of(self, length: int) -> list[Sample]:
        return [sample for sample in self._counted() if sample.length == length]

    def _counted(self) -> list[Sample]:
        return accepted(self.samples) if self.policy.attempts > 1 else self.samples

    def run(self, plan: Plan) -> None:
        """Take the missing samples; raise the MeasurementError that ends the measurement.

        A length that fails loses its samples, because even one failure rules out a claim for it.
        """
        self._leave_out(plan.implied(self.failures))
        while missing := self._missing(plan):
            self.recorder.planned(self._counted(), missing)
            failed = {failure.length for failure in self.failures}
            longest = max({*plan.lengths} - failed)
            try:
                self._round(longest, missing[: self.at_once])
            finally:
                self._leave_out(plan.implied(self.failures))
                self.recorder.round_done(self.samples, self.failures)

    def _missing(self, plan: Plan) -> list[int]:
        """Return the length of each sample that the plan still needs."""
        sampled = Counter(sample.length for sample in self._counted())
        settled = {length for length in sampled if is_settled(self.of(length))}
        return plan.missing(sampled, settled, self.failures)

    def _leave_out(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            self.samples[:] = [s for s in self.samples if s.length != failure.length]
            self.failures.append(failure)

    def _round(self, longest: int, lengths: Sequence[int]) -> None:
        """Take one sample of each of `lengths`, after the check of the longest."""
        self.rounds += 1
        self._disturbed = False
        errors = self._errors(longest, lengths)
        # a failure stops the other processes: report "stopped" only if there is no other error
        for length, error in [found for found in errors if found[1].kind != "stopped"] or errors:
            if error.kind not in self.policy.left_out:
                error.length = length
                raise error
            if all(failure.length != length for failure in self.failures):
                self._leave_out([Failure(length=length, kind=error.kind, reason=error.reason)])
                self.recorder.failed(length, error)
        self._require_quiet()
        if self._disturbed:
            self.wait(COOLING_SECONDS)

    def _require_quiet(self) -> None:
        """Raise a MeasurementError if too many consecutive samples of a length were rejected."""
        for length, number in self._rejected.items():
            if number >= self.policy.attempts:
                last = next(sample for sample in reversed(self.samples) if sample.length == length)
                reason = f"{number} samples at {length} tokens were disturbed: {rejection(last)}"
                error = MeasurementError(reason, "disturbed")
                error.length = length
                raise error

    def _errors(self, longest: int, lengths: Sequence[int]) -> list[tuple[int, MeasurementError]]:
        """Start the check and a process for each length; return the failures.

        The first error ends the processes that have not been timed yet.
        """
        stop = _Stop(self.options.stop)
        options = replace(self.options, stop=stop)
        errors = []
        with _held_lock() as (gpu_lock, release), ThreadPoolExecutor(len(lengths) + 2) as pool:
            heating = pool.submit(self._heat)
            checking = pool.submit(self._correctness, longest, options)

            def take(place: int) -> MeasurementError | None:
                try:
                    sample = self.measure(
                        self.tree,
                        lengths[place],
                        options,
                        cross_check=self.policy.checked,
                        cold_cache=self._is_cold(lengths, place),
                        gpu_lock=gpu_lock,
                    )
                    self._keep(sample, checking.result())
                except MeasurementError as error:
                    stop.set()
                    return error
                return None

            taking = [pool.submit(take, place) for place in range(len(lengths))]
            failed = None
            try:
                try:
                    checking.result()
                    heating.result()
                    release()
                except MeasurementError as error:
                    stop.set()
                    failed = error
                    errors.append((longest, failed))
                for length, future in zip(lengths, taking, strict=True):
                    problem = future.result()
                    if problem is not None and problem is not failed:
                        errors.append((length, problem))
            except BaseException:  # includes Ctrl-C
                stop.set()
                raise
        return errors

    def _is_cold(self, lengths: Sequence[int], place: int) -> bool:
        length = lengths[place]
        first = length not in lengths[:place] and not self.of(length)
        return first and length in self.policy.cold

    def _keep(self, sample: Sample, correctness: Correctness | None) -> None:
        """Add a sample. It was timed after the check had passed and the lock was released."""
        if correctness is not None:
            sample = confirm(sample, correctness)
        reason = rejection(sample) if self.policy.attempts > 1 else None
        with self._recording:
            self._require_same_machine(sample)
            self.samples.append(sample)
            if reason is None:
                del self._rejected[sample.length]
                self.recorder.accepted(sample, len(self.of(sample.length)))
            else:
                self._disturbed = True
                self._rejected[sample.length] += 1
                self.recorder.rejected(sample, self._rejected[sample.length], reason)

    def _require_same_machine(self, sample: Sample) -> None:
        """Raise a MeasurementError if the machine has changed, such as its cpuset or its driver."""
        before, now = (self.samples or [sample])[0].environment, sample.environment
        if before is None or now is None or before == now:
            return
        earlier = before.model_dump()
        changes = [
            f"{name} was {earlier[name]} and is {value}"
            for name, value in now.model_dump().items()
            if value != earlier[name]
        ]
        reason = f"the machine changed during the measurement: {'; '.join(changes)}"
        raise MeasurementError(reason, "crash")

    def _heat(self) -> None:
        if self.soak is not None and self.rounds == 1:
            with suppress(MeasurementError):  # without a soak, differences show up as noise
                result = self.soak()
                with self._recording:
                    self.recorder.heated(result)

    def _correctness(self, length: int, options: Options) -> Correctness | None:
        """Return a check that covers the length: of an earlier sample, or a new one."""
        if not self.policy.checked:
            return None
        for earlier in (sample.correctness for sample in self.samples):
            if earlier is not None and earlier.passed and covers(earlier, length):
                return earlier
        correctness = require_passed(self.check(self.tree, length, options))
        with self._recording:
            self.recorder.checked(correctness)
        return correctness


@contextmanager
def _held_lock() -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield the file of a GPU lock that this process holds, and a function that releases it."""
    with tempfile.TemporaryDirectory(prefix="gpu-lock-") as folder:
        path = Path(folder, "lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield path, lambda: fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)
