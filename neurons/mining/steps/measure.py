"""PUBLISHED to MEASURED: times the fork's commit in children and keeps the report."""

from __future__ import annotations

from neurons.mining.context import Context
from neurons.mining.cycle import State, Submission
from neurons.mining.series import describe_machine, lengths_to_measure, open_series


def run(submission: Submission, context: Context) -> Submission:
    """Measure every length, each in CLAIM_RUNS cold processes.

    What a run before a crash has already measured is taken from its report when the report's
    digest, commit and code match and the machine is the same.
    """
    if not context.lays_out(submission):
        return context.move(submission, State.NEW)
    environment = describe_machine(context.settings.device, context.probe)
    target = None if submission.auto_target else submission.target_sequence_length
    lengths = lengths_to_measure(target, environment.device)
    series = open_series(submission, context, environment)
    series.run(lengths)
    return context.move(
        submission, State.MEASURED, report=str(series.path.relative_to(context.settings.state_dir))
    )
