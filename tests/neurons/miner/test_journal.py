"""What the journal keeps of submissions, and what it refuses to write."""

from __future__ import annotations

import sqlite3
from dataclasses import fields, replace
from pathlib import Path

import pytest

from neurons.miner import cycle, journal, schema
from neurons.miner.cycle import CLOSED, State, Submission
from neurons.miner.journal import Journal, StaleSubmission
from tests.neurons.miner.parts import COMMITTING, HOTKEY, close, draft, new


def test_every_field_survives_a_reopening_to_the_bit(path: Path) -> None:
    with Journal(path) as log:
        first = new(log)
        full = replace(
            first,
            **COMMITTING,
            state=State.FAILED,
            resume_state=State.COMMITTING,
            auto_target=True,
            round_start="2026-01-01T00:00:00",
            round_total=5,
            submission_id=3,
            reveal_block=99,
            queued_at=3.5,
            judged_early_at=4.5,
            rank=1,
            weight=0.6,
            score=0.95,
            weighted_score=7.5,
            reason="lost",
            remedy="none",
            retry_at=1e9 + 0.1,
            attempts=4,
            updated_at=5.0,
        )
        log.transition(first, full)
    with Journal(path) as log:
        assert log.get(full.id) == full
        assert all(getattr(full, field.name) is not None for field in fields(Submission))


def test_the_salt_is_not_in_the_text_of_a_submission(log: Journal) -> None:
    assert "5" * 64 not in repr(replace(new(log), **COMMITTING))


def test_one_live_submission_for_each_hotkey_and_target(log: Journal) -> None:
    first = new(log)
    new(log, target=4096)
    new(log, hotkey="5Other")
    with pytest.raises(sqlite3.IntegrityError):
        new(log)
    held = log.transition(first, cycle.hold(first, "r", "m", 2.0))
    with pytest.raises(sqlite3.IntegrityError):
        new(log)
    log.transition(held, cycle.abandon(held, "r", 3.0))
    second = new(log)
    assert log.live(HOTKEY, 2048) == second
    assert [s.target_sequence_length for s in log.live_submissions(HOTKEY)] == [2048, 4096]


def test_a_second_connection_cannot_make_a_second_live_one(path: Path, log: Journal) -> None:
    new(log)
    with Journal(path) as other, pytest.raises(sqlite3.IntegrityError):
        new(other)


def test_a_change_and_its_event_are_one(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    first = new(log)
    monkeypatch.setattr(log, "_add_event", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        log.transition(first, cycle.fail(first, "r", 2.0, 0.0))
    assert log.get(first.id) == first
    assert len(log.events(first.id)) == 1


def test_a_stale_writer_is_refused(log: Journal) -> None:
    first = new(log)
    log.transition(first, cycle.fail(first, "r", 2.0, 0.0))
    with pytest.raises(StaleSubmission):
        log.transition(first, cycle.fail(first, "r", 2.0, 0.0))


def test_not_a_number_is_never_written(log: Journal) -> None:
    first = new(log)
    bad = {"512": {"tokens_per_sec": float("nan")}}
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.transition(first, replace(first, benchmarks=bad))
    assert log.get(first.id) == first


def test_the_last_sign_that_an_api_judges_early_is_remembered(path: Path) -> None:
    with Journal(path) as log:
        assert log.judges_early("https://api.example", 6.0) is None
        log.note_early_judgement("https://api.example", 5.0)
        log.note_early_judgement("https://api.example", 9.0)
    with Journal(path) as log:
        assert log.judges_early("https://api.example", 10.0) == 9.0
        assert log.judges_early("https://other.example", 10.0) is None


def test_the_index_knows_every_state_that_closes() -> None:
    written = {f"'{state.value}'" for state in CLOSED}
    assert set(schema.CLOSED_STATES.strip("()").split(", ")) == written


def test_history_is_bounded(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "EVENTS_KEPT", 10)
    monkeypatch.setattr(journal, "CLOSED_KEPT", 5)
    live = new(log, target=1)
    for _ in range(30):
        close(log, new(log))
    count = log._database.execute("SELECT count(*) FROM events").fetchone()[0]
    assert count == 10
    assert len(log.latest(100)) == 6
    assert log.live(HOTKEY, 1) == live


def test_each_list_has_its_own_and_its_newest_first(log: Journal) -> None:
    """Without a target, those count whose target the miner has chosen itself."""
    drafts = [
        draft(id=0, target_sequence_length=512, auto_target=True, round_id=1),
        draft(id=0, target_sequence_length=1024, auto_target=True, round_id=2),
        draft(id=0, target_sequence_length=2048, round_id=2),
        draft(id=0, target_sequence_length=512, auto_target=True, hotkey="5Other", round_id=2),
    ]
    first, second, chosen, other = (log.insert(one) for one in drafts)
    assert log.latest() == [other]
    assert log.latest(2) == [other, chosen]
    assert log.latest(hotkey=HOTKEY) == [chosen]
    assert log.live_submissions() == [other, chosen, second, first]
    assert log.live_submissions(HOTKEY) == [chosen, second, first]
    assert log.in_round(HOTKEY, 2) == [chosen, second]
    assert log.in_round(HOTKEY, None) == []
    assert (log.live(HOTKEY), log.live(HOTKEY, 2048)) == (second, chosen)
    assert log.live(HOTKEY, 4096) is None
    assert log.last_closed(HOTKEY, None) is None
    ended = [close(log, one) for one in (first, second, chosen)]
    assert log.live(HOTKEY) is None
    assert log.live_submissions() == [other]
    assert log.last_closed(HOTKEY, None) == ended[1]
    assert log.last_closed(HOTKEY, 512) == ended[0]
    assert log.last_closed(HOTKEY, 2048) == ended[2]
    assert [event.state for event in log.events(first.id)] == [State.NEW, State.VALIDATED]
    with pytest.raises(LookupError, match="no submission 99"):
        log.get(99)


def test_rejections_count_since_the_last_success_or_word_of_a_person(log: Journal) -> None:
    assert log.rejections(HOTKEY) == 0
    close(log, new(log), State.REJECTED)
    close(log, new(log), State.VALIDATED)
    close(log, new(log), State.REJECTED)
    close(log, new(log, hotkey="5Other"), State.REJECTED)
    close(log, new(log), State.UNRANKED)
    close(log, new(log), State.REJECTED)
    assert log.rejections(HOTKEY) == 2
    held = new(log)
    held = log.transition(held, cycle.hold(held, "r", "m", 2.0))
    log.transition(held, cycle.resume(held, 3.0), kind="acknowledged")
    assert log.rejections(HOTKEY) == 0
