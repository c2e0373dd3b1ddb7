"""The miner's measurements: plans, reuse of earlier samples, reactions to failures."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from structlog.stdlib import BoundLogger

from harness.claim import MAX_RUNS, lower_bound
from harness.hardware.machine import Environment
from harness.measuring.plan import FIRST_RUNS, EachLength, ForClaim, Plan
from harness.measuring.runner import MeasurementError, Options, call, probe
from harness.measuring.sampler import Policy, Sampler, processes_at_once
from harness.report import Report, ReportError, load_report
from harness.sample import Kind, Sample, accepted
from harness.source import source_digest
from harness.workload import LENGTHS, VALIDATOR_LENGTHS
from neurons.miner.recorder import ReportRecorder
from neurons.runtime.errors import Fault, Held
from neurons.runtime.process import Stopped
from neurons.runtime.settings import Settings

CRASHES_BEFORE_HELD = 2

MACHINE_ATTEMPTS, MACHINE_RETRY_SECONDS = 6, 60.0
"""Attempts to describe the machine before the submission is held, and the pause between them. A GPU
is missing while its driver is loaded, and on a busy machine the description may take too long."""

MAX_CPU_RUNS = 5
"""Maximum number of samples of the target on a CPU, where a claim is only a trial."""

SOAK, SOAK_SECONDS = "harness.worker.machine.soak:soak", 12.0
"""The heat soak's function, and its time limit."""

SLOWER, FASTER = 0.01, 1.03
"""A new sample confirms earlier ones if its speed is at least the one that 99% of samples reach, as
estimated from the earlier ones, and at most FASTER times their maximum."""

VALID_FOR = timedelta(days=14)
"""Age at which samples expire: hardware drifts in ways that the environment does not show."""

REPORTS_SEARCHED = 20
"""Number of the newest reports that are searched for earlier samples."""

TOO_LONG: frozenset[Kind] = frozenset({"timeout", "out_of_memory"})
"""Failures that exclude only this length and longer ones from the claim."""


def describe_machine(
    device: str,
    probe: Callable[[Options], Environment] = probe,
    stop: threading.Event | None = None,
) -> Environment:
    """Return the machine's description, which a child process makes; or raise Fault or Stopped."""
    try:
        return probe(Options(device, stop=stop))
    except MeasurementError as error:
        if error.kind == "stopped":
            raise Stopped("stop requested") from None
        raise Fault(
            f"Nothing can be measured on this machine: {error.reason}.",
            error.remedy or f"Remove this cause, or change DEVICE={device}.",
            MACHINE_RETRY_SECONDS,
            MACHINE_ATTEMPTS - 1,
        ) from error


@dataclass
class ClaimMeasurement:
    """The measurement of one commit on one machine, from which a claim is derived.

    A method that measures raises Fault if the measurement fails, and Stopped at a stop.
    """

    sampler: Sampler
    recorder: ReportRecorder
    runs: int  # minimum number of samples of the target
    most: int  # maximum number of samples of the target
    fresh: bool = False  # whether to ignore earlier reports

    def run_targets(self, targets: Iterable[int]) -> None:
        """Measure the validators' lengths and the first of the targets that succeeds.

        For unchanged kernels on an unchanged machine, it reuses earlier samples if one more sample
        confirms them.
        """
        targets, failed = tuple(targets), {failure.length for failure in self.sampler.failures}
        if not any(failed.isdisjoint(self._plan(target).lengths) for target in targets):
            # all targets failed before the submission was HELD: try them again
            self.sampler.failures = []
        with self.recorder:
            for target in targets:
                if self._reuse_earlier(target) or self._run(self._plan(target)):
                    return
        last = self.sampler.failures[-1]
        longer = ", or a larger BENCH_TIMEOUT_SECONDS" if last.kind == "timeout" else ""
        raise Held(
            f"Nothing can be claimed: {last.length} tokens failed: {last.reason}.",
            "Set TARGET_SEQUENCE_LENGTH to a length that fits this machine, or to auto"
            f"{longer}; the report {self.recorder.path.name} names every failure.",
        )

    def run_lengths(self, lengths: Sequence[int]) -> None:
        with self.recorder:
            self._run(EachLength(tuple(lengths), self.runs, TOO_LONG))

    def continue_after_crash(self) -> None:
        """Continue with the report from before a crash, if it is of this commit and machine."""
        recorder = self.recorder
        if not recorder.path.exists():
            return
        try:
            report = load_report(recorder.path)
        except ReportError as error:
            recorder.log.warning("measuring again", reason=str(error))
            return
        code = source_digest(self.sampler.tree)
        if (
            report.commit == recorder.commit
            and report.environment in (recorder.environment, None)
            and all(sample.source_digest == code for sample in report.measurements)
        ):
            here = {"environment": recorder.environment}
            self.sampler.samples = [one.model_copy(update=here) for one in report.measurements]
            self.sampler.failures = list(report.failures)
            recorder.log.info("measurements kept", runs=len(self.sampler.samples))

    def _plan(self, target: int, confirming: int = 0) -> ForClaim:
        at_once = self.sampler.at_once
        return ForClaim(target, VALIDATOR_LENGTHS, self.runs, self.most, at_once, confirming)

    def _reuse_earlier(self, target: int) -> bool:
        """Reuse earlier samples of this code and machine if a new sample confirms them."""
        sampler, log = self.sampler, self.recorder.log
        if self.fresh or sampler.samples:  # `continue_after_crash` has set samples
            return False
        code = source_digest(sampler.tree)
        folder, environment = self.recorder.path.parent, self.recorder.environment
        earlier = _earlier_samples(folder, environment, code, target)
        if not earlier:
            return False
        sampler.samples = earlier
        speeds = [sample.tokens_per_sec for sample in sampler.of(target)]
        log.info("reusing samples if a new one confirms them", runs=len(earlier), target=target)
        if self._run(self._plan(target, len(speeds))):
            again = sampler.of(target)[len(speeds)].tokens_per_sec
            if lower_bound(speeds, SLOWER) <= again <= FASTER * max(speeds):
                return True
            log.info("not confirmed; measuring again", tokens_per_sec=round(again))
        sampler.samples, sampler.failures = [], []
        return False

    def _run(self, plan: Plan) -> bool:
        """Take the samples of a plan; return whether all its lengths succeeded."""
        try:
            self.sampler.run(plan)
        except MeasurementError as error:
            self.recorder.log.debug("end of the worker's output", log=error.log_tail)
            raise _consequence(error, self.sampler.tree) from error
        failed = {failure.length for failure in self.sampler.failures}
        return failed.isdisjoint(plan.lengths)


def new_measurement(
    settings: Settings,
    tree: Path,
    environment: Environment,
    name: str,
    commit: str | None,
    log: BoundLogger,
    *,
    stop: threading.Event | None = None,
    fresh: bool = False,
    **parts: Any,
) -> ClaimMeasurement:
    """Return a measurement without samples, for the miner or `bench`.

    `name` is the report's, without `.json`; `parts` replace those of the sampler.
    """
    target, on_cpu = settings.target_sequence_length, environment.device == "cpu"
    path = settings.state_dir / "reports" / f"{name}.json"
    recorder = ReportRecorder(path, commit, environment, log, settings.state_dir)
    soak = partial(call, SOAK, SOAK_SECONDS, options=Options("cuda", 60.0, stop))
    sampler = Sampler(
        tree=tree,
        options=Options(settings.device, settings.bench_timeout_seconds, stop),
        policy=Policy(
            cold=LENGTHS if target == "auto" else {target}, attempts=3, left_out=TOO_LONG
        ),
        recorder=recorder,
        at_once=processes_at_once(environment),
        soak=None if on_cpu else soak,
        **parts,
    )
    most = max(MAX_CPU_RUNS if on_cpu else MAX_RUNS, settings.claim_runs)
    return ClaimMeasurement(sampler, recorder, settings.claim_runs, most, fresh)


def _earlier_samples(
    folder: Path, environment: Environment, code: str, target: int
) -> list[Sample]:
    """Return accepted samples of an earlier measurement of this code on this machine.

    They come from the newest valid report with samples of every length that validators time and
    FIRST_RUNS samples of the target. Without such a report the list is empty.
    """
    newest = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest[:REPORTS_SEARCHED]:
        try:
            report = load_report(path)
        except ReportError:
            continue
        usable = _usable(report, environment, code)
        if len(usable.get(target, ())) >= FIRST_RUNS and {*VALIDATOR_LENGTHS} <= set(usable):
            others = [one for n in VALIDATOR_LENGTHS if n != target for one in usable[n]]
            # with the sample that confirms them, there are at most MAX_RUNS
            return others + usable[target][1 - MAX_RUNS :]
    return []


def _usable(report: Report, environment: Environment, code: str) -> dict[int, list[Sample]]:
    if report.environment != environment:
        return {}
    since = datetime.now(timezone.utc) - VALID_FOR
    return {
        length: [sample for sample in accepted(samples) if sample.source_digest == code]
        for length, samples in report.by_length().items()
        if all(sample.started_at >= since for sample in samples)
    }


def _consequence(error: MeasurementError, tree: Path) -> Fault | Stopped:
    command = f"`.venv/bin/python -m harness --tree {shlex.quote(str(tree))}`"
    if error.kind == "stopped":
        return Stopped("stop requested")
    if error.kind == "gate":
        return Held(
            f"The kernels fail the correctness check at {error.length} tokens: {error.reason}.",
            f"Correct them ({command} shows the same); the miner notices the change.",
        )
    if error.kind == "import":
        return Held(f"The fork cannot be imported: {error.reason}.", error.remedy)
    if error.kind == "disturbed":
        return Held(f"{error.reason}.", "Stop other programs that use the GPU, or cool it.")
    return Fault(
        f"The worker at {error.length} tokens failed: {error.reason}.",
        f"Check the GPU with nvidia-smi, and run {command} for the worker's output.",
        held_after=CRASHES_BEFORE_HELD,
    )
