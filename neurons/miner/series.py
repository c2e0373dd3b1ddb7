"""The miner's measurements: which are taken, and what it means when they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from structlog.stdlib import BoundLogger

from harness.claim import RUNS_MOST
from harness.claim.rejection import rejection
from harness.claim.tolerance import lower_bound
from harness.measuring.runner import MeasurementError, call, probe
from harness.measuring.series import Policy
from harness.measuring.together import ShortSeries, processes_at_once
from harness.report import Environment, Kind, Measurement, Report, build_report, write_report
from harness.source import source_digest
from harness.workload import CPU_LIMIT, LENGTHS, VALIDATOR_LENGTHS, WORKLOAD, lengths_for
from neurons.miner.progress import ProgressFile
from neurons.miner.reports import earlier_runs
from neurons.runtime.errors import Held, Retry
from neurons.runtime.process import Stopped
from neurons.runtime.settings import Settings
from neurons.wire.rules import LEAGUES

CRASHES_ALLOWED = 3
REPORTS_KEPT = 200

CPU_RUNS_MOST = 5
"""Runs of the target on a CPU, where a claim is for trying the program out."""

LOWEST_LEAGUE = 100_000
"""Longest length that is tried in the lowest league."""

SOAK, SOAK_SECONDS = "harness.worker.machine.soak:soak", 12.0
"""What heats the GPU up before it is measured, and for how long at most."""

SLOWER, FASTER = 0.01, 1.03
"""A confirming run belongs to earlier ones unless it is slower than all but this share of such runs
would be, or faster by this factor than the fastest."""

TOO_LONG: frozenset[Kind] = frozenset({"timeout", "out_of_memory"})
"""Failures that cost a length and the longer ones their claim, and no more."""


def describe_machine(
    device: str, look: Callable[..., Environment] = probe, stop: threading.Event | None = None
) -> Environment:
    """Return the machine as a child process sees it.

    Raises:
        Held: nothing can be measured on it.
        Stopped: `stop` was set.
    """
    try:
        return look(device=device, stop=stop)
    except MeasurementError as error:
        if error.kind == "stopped":
            raise Stopped("asked to stop") from None
        raise Held(
            f"Nothing can be measured here: {error.reason}.",
            f"Mend what the sentence names, or change DEVICE={device}.",
        ) from error


def targets_to_try(target: int | None, device: str) -> tuple[int, ...]:
    """Return the targets of which the first that can be measured is claimed.

    `auto` (None) goes from the league with the highest multiplier down: speed hardly depends on the
    length there, so what fits in the highest league wins. Below, longer lengths are faster.

    Raises:
        Held: the target is not measured on a CPU.
    """
    if target is None and device == "cuda":
        leagues = [least for least, _, _ in LEAGUES if least > LENGTHS[0]]
        return tuple(sorted({*leagues, *(n for n in LENGTHS if n <= LOWEST_LEAGUE)}, reverse=True))
    if target is None:
        return tuple(sorted(lengths_for(CPU_LIMIT, device), reverse=True))
    if target not in lengths_for(target, device):
        raise Held(
            f"TARGET_SEQUENCE_LENGTH={target} cannot be measured on a CPU, and nothing is claimed "
            "that was not measured.",
            f"Use a machine with an NVIDIA GPU, or set TARGET_SEQUENCE_LENGTH to {CPU_LIMIT} to "
            "try the program out.",
        )
    return (target,)


@dataclass(kw_only=True)
class MinerSeries(ShortSeries):
    """The measurements of one commit on one machine, on the disk after every round of processes.

    `run_targets` and `run` raise Held or Retry for what ends them, and Stopped.

    Attributes:
        path: the report.
        commit: what is measured.
        crashes: how often in a row a worker has crashed before.
        anew: take up nothing that was measured before.
    """

    path: Path
    commit: str | None
    environment: Environment
    log: BoundLogger
    crashes: int = 0
    anew: bool = False
    _planned: dict[int, int] = field(default_factory=dict)
    _round_runs: list[Measurement] = field(default_factory=list)
    _publishing: threading.Lock = field(default_factory=threading.Lock)
    _progress: ProgressFile | None = None

    def run_targets(self, targets: Iterable[int]) -> None:
        """Measure the first of these targets that can be, and what validators time beside it.

        Unchanged kernels on an unchanged machine take up what was measured before, in another
        submission or by `bench`, when one run more confirms it.
        """
        with self._progress_shown():
            for target in targets:
                if self._confirmed(target) or self.run_for(target, VALIDATOR_LENGTHS):
                    return
        last = self.failures[-1]
        longer = ", or a larger BENCH_TIMEOUT_SECONDS" if last.kind == "timeout" else ""
        raise Held(
            f"Nothing can be claimed: {last.length} tokens failed: {last.reason}.",
            "Set TARGET_SEQUENCE_LENGTH to a length that fits this machine, or to auto"
            f"{longer}; the report {self.path.name} names every failure.",
        )

    def _confirmed(self, target: int) -> bool:
        """Take up earlier measurements of this code and machine, if a run of the target agrees."""
        if self.anew or self.measurements:  # after a crash it has its own
            return False
        code = source_digest(self.tree)
        earlier = earlier_runs(self.path.parent, self.environment, code, target)
        if not earlier:
            return False
        self.measurements = earlier
        speeds = [m.tokens_per_sec for m in self.of(target)]
        self.log.info("measured before; one run confirms it", runs=len(earlier), target=target)
        done = self.run_for(target, VALIDATOR_LENGTHS, more=1)
        if done:
            again = self.of(target)[len(speeds)].tokens_per_sec
            if lower_bound(speeds, SLOWER) <= again <= FASTER * max(speeds):
                return True
            self.log.info("not as before; measuring anew", tokens_per_sec=round(again))
        self.measurements, self.failures = [], []
        return False

    def take_up(self, report: Report) -> bool:
        """Take over what was measured before a crash, where commit, code and machine are these."""
        code = source_digest(self.tree)
        if (
            report.commit != self.commit
            or report.environment not in (self.environment, None)
            or any(m.source_digest != code for m in report.measurements)
        ):
            return False
        here = {"environment": self.environment}
        self.measurements = [m.model_copy(update=here) for m in report.measurements]
        self.failures = list(report.failures)
        return True

    def run(self, lengths: Iterable[int]) -> None:
        wanted = list(lengths)
        with self._progress_shown():
            self._planned = dict.fromkeys(wanted, self.policy.runs)
            self._publish()
            super().run(wanted)

    @contextmanager
    def _progress_shown(self) -> Iterator[None]:
        self._progress = ProgressFile(self.path.parents[1])  # the state folder
        try:
            yield
        finally:
            self._progress.remove()
            self._progress = None

    def _publish(self) -> None:
        if self._progress is None:
            return
        with self._publishing:
            speeds = {n: [m.tokens_per_sec for m in self.of(n)] for n in self._planned}
            for run in self._round_runs:
                speeds[run.length].append(run.tokens_per_sec)
            self._progress.publish(self._planned, speeds)

    def planned(self, lengths: Sequence[int]) -> None:
        have = {*lengths, *(m.length for m in self.measurements)}
        self._planned = {n: len(self.of(n)) + lengths.count(n) for n in have}
        self._round_runs = []
        self._publish()

    def timed(self, measurement: Measurement) -> None:
        if rejection(measurement) is None:
            self._round_runs.append(measurement)
        self._publish()

    def heated(self, result: object) -> None:
        self.log.info("the GPU is warm", soak=result)

    def started(self, length: int) -> None:
        if not self.of(length):
            self.log.info("measuring", length=length)

    def measured(self, measurement: Measurement) -> None:
        self.log.info(
            "measured",
            length=measurement.length,
            run=len(self.of(measurement.length)),
            tokens_per_sec=round(measurement.tokens_per_sec),
            vram_mb=round(measurement.vram_mb),
            first_call_seconds=round(measurement.first_call_seconds, 2),
        )
        self._round_runs = [run for run in self._round_runs if run is not measurement]
        self._publish()

    def disturbed(self, length: int, number: int, reason: str) -> None:
        self.log.warning("sample dropped", length=length, attempt=number, reason=reason)

    def failed(self, length: int, error: MeasurementError) -> None:
        self.log.debug("the worker's last words", log=error.log_tail)
        if error.kind not in self.policy.left_out:
            raise _meaning(error, length, self.crashes) from error
        self.log.warning(
            "no claim for this length", length=length, kind=error.kind, reason=error.reason
        )

    def round_done(self) -> None:
        protocol = WORKLOAD.describe(self.environment.device)
        write_report(
            self.path, build_report(protocol, self.commit, self.measurements, self.failures)
        )
        newest = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in newest[:-REPORTS_KEPT]:
            old.unlink()


def new_series(
    settings: Settings,
    tree: Path,
    environment: Environment,
    name: str,
    commit: str | None,
    log: BoundLogger,
    **parts: Any,
) -> MinerSeries:
    """Return an empty series as the miner takes it; `bench` takes the same.

    Args:
        name: of the report, without its ending.
        parts: what replaces the series' own `measure`, `check`, `wait`, `stop`, and the like.
    """
    target = settings.target_sequence_length
    policy = Policy(
        settings.claim_runs,
        cold=LENGTHS if target == "auto" else {target},
        samples=3,
        left_out=TOO_LONG,
        too_long=TOO_LONG,
    )
    on_cpu = environment.device == "cpu"
    soak = partial(call, SOAK, SOAK_SECONDS, device="cuda", timeout=60.0, stop=parts.get("stop"))
    return MinerSeries(
        *(tree, policy, settings.device, settings.bench_timeout_seconds),
        soak=None if on_cpu else soak,
        at_once=processes_at_once(environment),
        most=max(CPU_RUNS_MOST if on_cpu else RUNS_MOST, settings.claim_runs),
        path=settings.state_dir / "reports" / f"{name}.json",
        commit=commit,
        environment=environment,
        log=log,
        **parts,
    )


def _meaning(error: MeasurementError, length: int, crashes: int) -> Held | Retry | Stopped:
    """Return what the end of a series means for the submission."""
    if error.kind == "stopped":
        return Stopped("asked to stop")
    if error.kind == "gate":
        return Held(
            f"The kernels fail the correctness gate at {length} tokens: {error.reason}.",
            "Mend them (`python -m harness` shows the same); a change is picked up by itself.",
        )
    if error.kind == "import":
        return Held(f"The fork cannot be imported: {error.reason}.", error.remedy)
    if error.kind == "disturbed":
        return Held(f"{error.reason}.", "Stop what else uses the GPU, or cool it.")
    if crashes + 1 < CRASHES_ALLOWED:
        return Retry(f"The worker at {length} tokens failed: {error.reason}.")
    return Held(
        f"The worker at {length} tokens failed {CRASHES_ALLOWED} times: {error.reason}.",
        "Check the GPU with nvidia-smi and run `python -m harness` for the worker's own words.",
    )
