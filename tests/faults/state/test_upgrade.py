"""A state folder that an earlier version left behind, with a commitment that waits for its reveal.

`journal_of_schema_3.sqlite` was written by commit 95d4c2e itself, stopped before the reveal block
of a commitment to the stand-in. A change of the schema adds the file of the version before it here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from neurons.mining.daemon import run_cycle
from neurons.mining.submissions.cycle import State
from neurons.mining.submissions.journal import Journal
from tests.neurons.mining.parts import HOTKEY, StandInBench, make_context, states
from tests.neurons.stand_in import StandIn


def test_row_18_a_live_commitment_of_an_earlier_version_is_revealed(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    left_behind = Path(__file__).with_name("journal_of_schema_3.sqlite")
    path = tmp_path / "journal.sqlite"
    shutil.copyfile(left_behind, path)
    with Journal(path, copy=True) as journal:
        before = journal.latest()[0]
    assert before.state is State.COMMITTED
    stand_in.registered.add(HOTKEY)
    stand_in.add_foreign(
        revealed=False,
        reveal_block=before.reveal_block,
        miner_hotkey=HOTKEY,
        target_sequence_length=before.target_sequence_length,
    )
    stand_in.rows[0]["commitment_hash"] = before.commitment_hash

    bench = StandInBench()
    context = make_context(tmp_path, url, measure=bench)
    done = run_cycle(context)
    assert (done.id, done.state, bench.calls) == (before.id, State.VALIDATED, [])
    assert states(context, done.id)[:6] == [
        *(State.NEW, State.PUBLISHED, State.MEASURED, State.CLAIMED),
        *(State.COMMITTING, State.COMMITTED),
    ]
    (row,) = stand_in.rows
    assert row["tokens_per_sec"] == before.tokens_per_sec
    assert (stand_in.count("/commit_submission"), stand_in.hash_mismatches) == (0, 0)
    assert run_cycle(context).id == 2  # the folder takes the next submission
