"""PUBLISHED to MEASURED: times the fork's commit in children and keeps the report."""

from __future__ import annotations

from harness.report import Environment, ReportError, load_report
from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.miner.series import (
    MinerSeries,
    describe_machine,
    new_series,
    targets_to_try,
)


def run(submission: Submission, context: Context) -> Submission:
    """Measure what the claim needs; nothing that is known already is measured again.

    What a run before a crash has measured is taken from its report when the report's digest,
    commit and code match and the machine is the same.
    """
    if not context.lays_out(submission):
        return context.move(submission, State.NEW)
    environment = describe_machine(context.settings.device, context.probe, context.stop)
    target = None if submission.auto_target else submission.target_sequence_length
    targets = targets_to_try(target, environment.device)
    series = _open_series(submission, context, environment)
    series.run_targets(targets)
    return context.move(
        submission, State.MEASURED, report=str(series.path.relative_to(context.settings.state_dir))
    )


def _open_series(submission: Submission, context: Context, environment: Environment) -> MinerSeries:
    """Return the series of a submission, with what was measured before a crash."""
    commit = str(submission.commit_hash)
    series = new_series(
        *(context.settings, context.fork.worktree, environment),
        *(f"{commit}-{environment.device}-{submission.id}", commit, context.log),
        stop=context.stop,
        measure=context.measure,
        check=context.check,
        wait=context.wait,
        crashes=submission.attempts,
    )
    if series.path.exists():
        try:
            if series.take_up(load_report(series.path)):
                context.log.info("measurements kept", runs=len(series.measurements))
        except ReportError as error:
            context.log.warning("measuring again", reason=str(error))
    return series
