"""kill -9 of a real process before and after the main transitions and requests."""

import multiprocessing
import signal
from pathlib import Path

import pytest

from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from neurons.miner.journal import Journal
from neurons.wire.protocol import commitment_hash
from tests.faults.state.crash_child import main
from tests.neurons.miner.parts import HOTKEY, make_context
from tests.processes import HANG

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([main.__module__])  # otherwise each process imports the miner


def around(*places: str) -> list[str]:
    """Return the moments before and after each of these states, paths and pushes."""
    return [f"{when}:{what}" for what in places for when in ("before", "after")]


MOMENTS = around(
    *("/register_miner", "push", "PUBLISHED", "MEASURED", "CLAIMED"),
    *("COMMITTING", "/commit_submission", "COMMITTED"),
    *("REVEALING", "/reveal_submission", "REVEALED", "/get_weights", "VALIDATED"),
)
DIRECT = around("SUBMITTING", "/submit_kernel", "REVEALED")


def run_miner(state_dir: Path, url: str, moment: str, mode: str = "commit_reveal") -> int:
    """Run the miner in a new process; return its exit status."""
    process = PROCESSES.Process(target=main, args=(state_dir, url, mode, moment))
    process.start()
    process.join(HANG)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("moment", MOMENTS)
def test_row_01_a_killed_miner_completes_the_same_submission(tmp_path, url, fake_api, moment):
    assert run_miner(tmp_path, url, moment) == -signal.SIGKILL
    with Journal(tmp_path / "journal.sqlite") as journal:
        left = journal.latest()[0]
    done = run_cycle(make_context(tmp_path, url))

    # After the last moment the submission is closed, so the next cycle makes a new one.
    assert (done.id, done.state) == (2 if moment == "after:VALIDATED" else left.id, State.VALIDATED)
    assert (len(fake_api.rows), fake_api.count("/commit_submission")) == (done.id, done.id)
    # A reveal without a journalled reply is sent again, and the server answers 409.
    again = moment in ("after:/reveal_submission", "before:REVEALED")
    assert (fake_api.count("/reveal_submission"), fake_api.hash_mismatches) == (done.id + again, 0)
    if left.salt is not None:
        assert commitment_hash(left.salt, str(left.fork_url)) == left.commitment_hash
        assert fake_api.body_of("/commit_submission")["commitment_hash"] == left.commitment_hash
    if left.state not in (State.NEW, State.PUBLISHED, State.MEASURED, State.CLAIMED):
        assert left.salt is not None


@pytest.mark.parametrize("moment", DIRECT)
def test_row_01_a_killed_direct_submission_is_made_once(tmp_path, url, fake_api, moment):
    assert run_miner(tmp_path, url, moment, "direct") == -signal.SIGKILL
    done = run_cycle(make_context(tmp_path, url, submission_mode="direct"))
    assert (done.id, done.state) == (1, State.VALIDATED)
    assert [row["id"] for row in fake_api.rows] == [done.submission_id]
    assert fake_api.count("/submit_kernel") == 1


def test_row_01_repeated_kills_leave_one_submission(tmp_path, url, fake_api):
    for moment in ("after:COMMITTING", "after:/commit_submission", "after:/reveal_submission"):
        assert run_miner(tmp_path, url, moment) == -signal.SIGKILL
    assert run_miner(tmp_path, url, "never") == 0
    assert len(fake_api.rows) == 1
    assert fake_api.count("/reveal_submission") == 2  # the second is answered with 409
    with Journal(tmp_path / "journal.sqlite") as journal:
        assert (journal.live(HOTKEY, 2048), journal.latest()[0].state) == (None, State.VALIDATED)
