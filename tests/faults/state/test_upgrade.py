"""The journal of an earlier version, with a commitment that waits for its reveal.

The miner of git commit 95d4c2e wrote `journal_of_schema_3.sqlite`. It had committed to the fake API
and was stopped before the reveal block. If you change the schema, add the previous version's file.
"""

import shutil
from pathlib import Path

from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from neurons.miner.journal import Journal
from tests.neurons.miner.parts import HOTKEY, FakeBench, make_context, states


def test_row_18_a_live_commitment_of_an_earlier_version_is_revealed(tmp_path, url, fake_api):
    earlier = Path(__file__).with_name("journal_of_schema_3.sqlite")
    path = tmp_path / "journal.sqlite"
    shutil.copyfile(earlier, path)
    with Journal(path, copy=True) as journal:
        before = journal.latest()[0]
    assert before.state is State.COMMITTED
    fake_api.registered.add(HOTKEY)
    fake_api.add_foreign(
        revealed=False,
        reveal_block=before.reveal_block,
        miner_hotkey=HOTKEY,
        target_sequence_length=before.target_sequence_length,
    )
    fake_api.rows[0]["commitment_hash"] = before.commitment_hash

    bench = FakeBench()
    context = make_context(tmp_path, url, measure=bench)
    done = run_cycle(context)
    assert (done.id, done.state, bench.calls) == (before.id, State.VALIDATED, [])
    assert states(context, done.id)[:6] == [
        *(State.NEW, State.PUBLISHED, State.MEASURED, State.CLAIMED),
        *(State.COMMITTING, State.COMMITTED),
    ]
    (row,) = fake_api.rows
    assert row["tokens_per_sec"] == before.tokens_per_sec
    assert (fake_api.count("/commit_submission"), fake_api.hash_mismatches) == (0, 0)
    assert run_cycle(context).id == 2  # the upgraded journal accepts the next submission
