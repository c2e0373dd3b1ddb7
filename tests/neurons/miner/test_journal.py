"""The journal: its rows and queries, and the writes that it refuses."""

import sqlite3
from dataclasses import fields, replace
from pathlib import Path

import pytest

from neurons.miner import cycle, journal, schema
from neurons.miner.cycle import CLOSED, State, Submission
from neurons.miner.journal import Journal, StaleSubmission
from neurons.runtime.errors import Held, Retry
from tests.neurons.miner.parts import COMMITTING, HOTKEY, close, draft, history, new


def test_every_field_is_read_back_exactly(path: Path) -> None:
    with Journal(path) as log:
        first = new(log)
        values = {**COMMITTING, "state": State.FAILED, "resume_state": State.COMMITTING}
        values |= {"round_total": 5, "submission_id": 3, "reveal_block": 99, "attempts": 4}
        values |= {"queued_at": 3.5, "judged_early_at": 4.5, "retry_at": 1e9 + 0.1}
        values |= {"rank": 1, "weight": 0.6, "score": 0.95, "weighted_score": 7.5}
        values |= {"round_start": "2026-01-01T00:00:00", "reason": "lost", "remedy": "none"}
        full = replace(first, **values, auto_target=True, updated_at=5.0)
        log.transition(first, full)
    with Journal(path) as log:
        assert log.get(full.id) == full
        assert all(getattr(full, field.name) is not None for field in fields(Submission))


def test_repr_omits_the_salt() -> None:
    assert "5" * 64 not in repr(draft(**COMMITTING))


def test_only_one_live_submission_per_hotkey_and_target(log: Journal) -> None:
    first = new(log)
    new(log, target=4096)
    new(log, hotkey="5Other")
    with pytest.raises(sqlite3.IntegrityError):
        new(log)
    held = log.transition(first, cycle.pause(first, Held("r", "m"), 2.0, 0.0))
    with pytest.raises(sqlite3.IntegrityError):
        new(log)
    log.transition(held, cycle.abandon(held, "r", 3.0))
    second = new(log)
    assert log.live(HOTKEY, 2048) == second
    assert [s.target_sequence_length for s in log.live_submissions(HOTKEY)] == [2048, 4096]


def test_a_change_and_its_event_are_one_transaction(log, monkeypatch):
    first = new(log)
    monkeypatch.setattr(log, "_add_event", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        log.transition(first, cycle.pause(first, Retry("r"), 2.0, 0.0))
    assert (log.get(first.id), history(log, first.id)) == (first, [State.NEW])


def test_a_stale_writer_is_refused(log: Journal) -> None:
    first = new(log)
    log.transition(first, cycle.pause(first, Retry("r"), 2.0, 0.0))
    with pytest.raises(StaleSubmission):
        log.transition(first, cycle.pause(first, Retry("r"), 2.0, 0.0))


def test_the_last_early_judgement_of_each_api_is_stored(log: Journal) -> None:
    log.note_early_judgement("https://api.example", 5.0)
    log.note_early_judgement("https://api.example", 9.0)
    assert log.judges_early("https://api.example", 10.0) == 9.0
    assert log.judges_early("https://api.example", 9.0 + 48 * 3600.0) is None  # a round later
    assert log.judges_early("https://other.example", 10.0) is None
    log.note_early_judgement("https://api.example", 1e9)  # by a clock that was set back later
    assert log.judges_early("https://api.example", 1e8) is None


def test_the_schema_has_every_closed_state() -> None:
    closed = {f"'{state.value}'" for state in CLOSED}
    assert set(schema.CLOSED_STATES.strip("()").split(", ")) == closed


def test_history_is_bounded(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "EVENTS_KEPT", 10)
    monkeypatch.setattr(journal, "CLOSED_KEPT", 5)
    live = new(log, target=1)
    for _ in range(30):
        close(log, new(log))
    count = log._database.execute("SELECT count(*) FROM events").fetchone()[0]
    assert count == 10
    assert (len(log.latest(100)), log.live(HOTKEY, 1)) == (6, live)


def test_queries_return_the_newest_first_of_a_hotkey_a_round_or_a_target(log: Journal) -> None:
    """Without a target, they return submissions with `auto_target`."""
    drafts = [
        draft(id=0, target_sequence_length=512, auto_target=True, round_id=1),
        draft(id=0, target_sequence_length=1024, auto_target=True, round_id=2),
        draft(id=0, target_sequence_length=2048, round_id=2),
        draft(id=0, target_sequence_length=512, auto_target=True, hotkey="5Other", round_id=2),
    ]
    first, second, chosen, other = (log.insert(one) for one in drafts)
    assert (log.latest(), log.latest(2)) == ([other], [other, chosen])
    assert log.latest(hotkey=HOTKEY) == [chosen]
    assert log.live_submissions() == [other, chosen, second, first]
    assert log.live_submissions(HOTKEY) == [chosen, second, first]
    assert (log.in_round(HOTKEY, 2), log.in_round(HOTKEY, None)) == ([chosen, second], [])
    assert (log.live(HOTKEY), log.live(HOTKEY, 2048)) == (second, chosen)
    assert (log.live(HOTKEY, 4096), log.last_closed(HOTKEY, None)) == (None, None)
    ended = [close(log, one) for one in (first, second, chosen)]
    assert (log.live(HOTKEY), log.live_submissions()) == (None, [other])
    assert (log.last_closed(HOTKEY, None), log.last_closed(HOTKEY, 512)) == (ended[1], ended[0])
    assert log.last_closed(HOTKEY, 2048) == ended[2]
    assert history(log, first.id) == [State.NEW, State.VALIDATED]
    with pytest.raises(LookupError, match="no submission 99"):
        log.get(99)


def test_rejections_count_since_the_last_success_or_acknowledgement(log: Journal) -> None:
    assert log.rejections(HOTKEY) == 0
    close(log, new(log), State.REJECTED)
    close(log, new(log), State.VALIDATED)
    close(log, new(log), State.REJECTED)
    close(log, new(log, hotkey="5Other"), State.REJECTED)
    close(log, new(log), State.UNRANKED)
    close(log, new(log), State.REJECTED)
    assert log.rejections(HOTKEY) == 2
    held = new(log)
    held = log.transition(held, cycle.pause(held, Held("r", "m"), 2.0, 0.0))
    log.transition(held, cycle.resume(held, 3.0), kind="acknowledged")
    assert log.rejections(HOTKEY) == 0
