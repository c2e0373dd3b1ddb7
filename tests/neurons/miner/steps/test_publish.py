"""What the publish step and the later checks do when the git host refuses access."""

from __future__ import annotations

import pytest

from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from neurons.miner.steps.prepare import _publish
from neurons.runtime.errors import Retry
from neurons.runtime.git.faults import HostRefused, PrivateFork


def refuse(kind):
    def on_verify() -> None:
        raise kind("The remote refused the credentials.", "Check GITHUB_TOKEN.")

    return on_verify


@pytest.mark.parametrize(("kind", "later"), [(HostRefused, Retry), (PrivateFork, PrivateFork)])
def test_a_refusal_of_a_fork_that_worked_before_is_temporary(context, kind, later):
    assert run_cycle(context).state is State.VALIDATED
    submission = context.journal.latest()[0]
    context.fork.on_verify = refuse(kind)
    with pytest.raises(later):
        _publish(submission, context)


def test_a_refusal_of_a_fork_that_never_worked_is_permanent(context):
    context.fork.on_verify = refuse(HostRefused)
    assert run_cycle(context).state is State.HELD


def test_after_the_commitment_no_refusal_holds_the_reveal(context):
    assert run_cycle(context).state is State.VALIDATED
    submission = context.journal.latest()[0]
    context.fork.on_verify = refuse(PrivateFork)
    with pytest.raises(Retry):
        context.verify_again(submission)
