"""The short cycle: what one claim needs, in processes that start together and are timed alone."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.claim import RUNS_MOST, is_settled
from harness.claim.rejection import accepted, rejection
from harness.measuring.runner import MeasurementError, check
from harness.measuring.series import Series
from harness.report import Environment, Failure, GateResult, Measurement
from harness.workload import ORACLE_LENGTH

FIRST_RUNS = 5
"""Runs of the target that are started with the others: on a quiet GPU fewer never settle."""

FURTHER_RUNS = 5
"""Runs that are started at once when those were too few."""

AT_ONCE_MOST, MIB_EACH = 14, 4096
"""Processes that import side by side, each on a core: most of them, and host memory for one."""


def processes_at_once(machine: Environment) -> int:
    """Return how many processes may import side by side on a machine."""
    room = AT_ONCE_MOST if machine.memory_mb is None else int(machine.memory_mb // MIB_EACH)
    return max(1, min(machine.usable_cpus or machine.cpu_count, room, AT_ONCE_MOST))


Outcome = tuple[int, Measurement | MeasurementError]
"""What came of one process at a length."""


class Check(Protocol):
    """`runner.check`, or its stand-in."""

    def __call__(
        self, tree: Path, length: int, *, device: str, timeout: float, stop: threading.Event | None
    ) -> GateResult:
        """Check one tree in a fresh process."""


class _Stop(threading.Event):
    """Is set by itself, or with another event."""

    def __init__(self, other: threading.Event | None) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or (self._other is not None and self._other.is_set())


@dataclass(kw_only=True)
class ShortSeries(Series):
    """A series that measures what the claim for one target needs, and no more.

    Processes are started in rounds: those of one round import side by side, while the gate of the
    target runs, and are timed one after another once it is green. Runs that do not count stay
    among the measurements, so that a claim can name them.

    Attributes:
        check: `runner.check` or its stand-in.
        soak: heats the GPU up while the processes of the first round import; on a cold one clocks
            are higher than a validator's have to be.
        at_once: processes of one round.
        most: runs of the target after which no more are taken.
        rounds: how many were started.
    """

    check: Check = check
    soak: Callable[[], object] | None = None
    at_once: int = 1
    most: int = RUNS_MOST
    rounds: int = 0
    _dropped: dict[int, list[str]] = field(default_factory=dict)

    def of(self, length: int) -> list[Measurement]:
        """Return the runs of one length that count."""
        return accepted(m for m in self.measurements if m.length == length)

    def run_for(self, target: int, beside: Iterable[int], more: int = 0) -> bool:
        """Measure the target, and the lengths that are timed beside it; tell whether all could be.

        The latter take a process each, as nobody judges their speed; the target takes at least
        FIRST_RUNS and `policy.runs`, and as many as its noise asks for. Places of the first round
        that are free take it, too: a further round would cost its imports again. What is there
        already counts; `more` runs of the target are taken all the same.

        Raises:
            MeasurementError: a failure that ends the series. What it has stays.
        """
        others = sorted({*beside} - {target})
        wanted = [target] * more
        while wanted := wanted or self._missing(target, others):
            self.planned(wanted)
            lengths, wanted = wanted[: self.at_once], wanted[self.at_once :]
            self._round(max([target, *others]), lengths)
            if self._failed(target, others):
                return False
        return not self._failed(target, others)

    def _missing(self, target: int, others: Sequence[int]) -> list[int]:
        """Return the lengths of the runs that are still wanted, in their order."""
        missing = [length for length in others if not self.of(length)]
        runs = self.of(target)
        room = 0 if runs else self.at_once - len(missing)
        first = min(max(FIRST_RUNS, self.policy.runs, room), self.most)
        if len(runs) < first:
            missing += [target] * (first - len(runs))
        elif len(runs) < self.most and not is_settled(runs):
            missing += [target] * min(FURTHER_RUNS, self.most - len(runs))
        return missing

    def _failed(self, target: int, others: Sequence[int]) -> bool:
        """Tell whether the target cannot be claimed; what fails beside it fails it too."""
        failed = {failure.length: failure for failure in self.failures}
        beside = next((failed[length] for length in others if length in failed), None)
        if beside is not None and target not in failed:
            reason = f"{beside.length} tokens, which validators time too, failed: {beside.reason}"
            self._leave_out(Failure(length=target, kind=beside.kind, reason=reason))
        return beside is not None or target in failed

    def _leave_out(self, failure: Failure) -> None:
        self.measurements[:] = [m for m in self.measurements if m.length != failure.length]
        self.failures.append(failure)

    def _round(self, longest: int, lengths: Sequence[int]) -> None:
        """Take one run of each of `lengths`, behind the gate of the longest, and judge them."""
        self.rounds += 1
        for length in sorted(set(lengths)):
            self.started(length)
        outcomes = self._outcomes(longest, lengths)
        runs = [outcome for _, outcome in outcomes if isinstance(outcome, Measurement)]
        disturbed = [self._judge(run) for run in runs]
        ended = self._failures(outcomes) or self._too_disturbed()
        self.round_done()
        if ended is not None:
            self.failed(*ended)
            raise ended[1]
        if any(disturbed):
            self.wait(self.policy.cooling_seconds)

    def _failures(self, outcomes: Sequence[Outcome]) -> tuple[int, MeasurementError] | None:
        """Leave out the lengths that failed; return the failure that ends the series."""
        errors = [(n, error) for n, error in outcomes if isinstance(error, MeasurementError)]
        # the first failure stops the other processes, which is none of their own
        for length, error in [one for one in errors if one[1].kind != "stopped"] or errors:
            if error.kind not in self.policy.left_out:
                return length, error
            if all(failure.length != length for failure in self.failures):
                self._leave_out(Failure(length=length, kind=error.kind, reason=error.reason))
                self.failed(length, error)
        return None

    def _judge(self, measurement: Measurement) -> bool:
        """Keep a run; tell whether it was disturbed."""
        self.measurements.append(measurement)
        reason = rejection(measurement)
        if reason is None:
            self._dropped.pop(measurement.length, None)
            self.measured(measurement)
            return False
        length = measurement.length
        self._dropped.setdefault(length, []).append(reason)
        self.disturbed(length, len(self._dropped[length]), reason)
        return True

    def _too_disturbed(self) -> tuple[int, MeasurementError] | None:
        """Return a length whose samples were all disturbed, and the error that ends the series."""
        for length, reasons in self._dropped.items():
            if len(reasons) >= self.policy.samples:
                told = f"{len(reasons)} samples at {length} tokens were disturbed: {reasons[-1]}"
                return length, MeasurementError(told, "disturbed")
        return None

    def planned(self, lengths: Sequence[int]) -> None:
        """Called before a round with the length of each run that is wanted, later rounds included.

        Does nothing here, as `timed` and `round_done`, which subclasses override.
        """

    def timed(self, measurement: Measurement) -> None:
        """Called in a thread when one process of a round has ended, before its run is judged."""

    def round_done(self) -> None:
        """Hear that the processes of a round have ended."""

    def _outcomes(self, longest: int, lengths: Sequence[int]) -> list[Outcome]:
        """Start a process for each length, and the gate unless there is one; return what came.

        The first error ends what has not been timed yet, since nothing can come of it.
        """
        stop = _Stop(self.stop)
        with _held_turn() as (turn, release), ThreadPoolExecutor(len(lengths) + 2) as pool:
            heat = pool.submit(self._heat)
            gate = pool.submit(self._gate, longest, stop)

            def take(place: int, length: int) -> Measurement | MeasurementError:
                first = length not in lengths[:place] and not self.of(length)
                try:
                    run = self.measure(
                        *(self.tree, length),
                        device=self.device,
                        gate=gate.result,
                        timeout=self.timeout,
                        stop=stop,
                        cold_cache=first and length in self.policy.cold,
                        turn=turn,
                    )
                    self.timed(run)
                    return run
                except MeasurementError as error:
                    stop.set()
                    return error

            runs = [pool.submit(take, place, length) for place, length in enumerate(lengths)]
            try:
                checked = gate.result()
            except MeasurementError as error:
                stop.set()
                ended = zip(lengths, [run.result() for run in runs], strict=True)
                return [(longest, error), *ended]  # a run may have stopped the gate
            if not checked.passed:
                stop.set()
                failed = "; ".join(str(one) for one in checked.failed[:3])
                return [
                    (longest, MeasurementError(f"wrong results: {failed}", "gate", "", checked))
                ]
            heat.result()
            release()
            return list(zip(lengths, [run.result() for run in runs], strict=True))

    def _heat(self) -> None:
        if self.soak is not None and self.rounds == 1:
            with suppress(MeasurementError):  # as without a soak: what differs is seen as noise
                self.heated(self.soak())

    def heated(self, result: object) -> None:
        """Hear what `soak` returned."""

    def _gate(self, length: int, stop: threading.Event) -> GateResult:
        """Return the gate of an earlier run of this series that covers the length, or a new one."""
        enough = min(length, ORACLE_LENGTH)
        for gate in (m.gate for m in self.measurements):
            if gate is not None and gate.passed and gate.longest >= enough:
                return gate
        return self.check(*(self.tree, length), device=self.device, timeout=self.timeout, stop=stop)


@contextmanager
def _held_turn() -> Iterator[tuple[Path, Callable[[], None]]]:
    """Give a turn's file that nobody takes before its release, and that release."""
    with tempfile.TemporaryDirectory(prefix="turn-") as folder:
        turn = Path(folder, "turn")
        lock = os.open(turn, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield turn, lambda: fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)
