"""The step from PUBLISHED to MEASURED: measures the commit and stores the report."""

from __future__ import annotations

from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.miner.measuring import describe_machine, new_measurement
from neurons.miner.targets import targets_here


def run(submission: Submission, context: Context) -> Submission:
    """Take the samples that the claim needs, in addition to those from before a crash."""
    if not context.check_out(submission):
        return context.move(submission, State.NEW)
    environment = describe_machine(context.settings.device, context.probe, context.stop)
    target = None if submission.auto_target else submission.target_sequence_length
    targets = targets_here(target, environment, context.settings)
    measurement = new_measurement(
        context.settings,
        context.fork.worktree,
        environment,
        f"{submission.commit_hash}-{environment.device}-{submission.id}",
        submission.commit_hash,
        context.log,
        stop=context.stop,
        measure=context.measure,
        check=context.check,
        wait=context.wait,
    )
    measurement.continue_after_crash()
    measurement.run_targets(targets)
    report = measurement.recorder.path.relative_to(context.settings.state_dir)
    return context.move(submission, State.MEASURED, report=str(report))
