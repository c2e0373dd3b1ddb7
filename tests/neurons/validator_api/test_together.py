"""Commitments that come at once share a transaction, and are answered as if each came alone."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from sqlalchemy import event, select
from sqlalchemy.engine import Engine

from neurons.validator_api.competition import bans, commits, rounds
from neurons.validator_api.competition.commits import Commit
from neurons.validator_api.competition.moment import Moment
from neurons.validator_api.competition.withdrawals import OPEN_A_HOTKEY
from neurons.validator_api.config import ApiConfig, utc
from neurons.validator_api.database.storage import Storage
from neurons.validator_api.database.tables import Miner, Submission
from neurons.validator_api.database.together import MOST, Together
from neurons.wire.protocol import CommitRequest
from tests.neurons.live_api import ALICE, BOB, LiveApi, commitment
from tests.processes import HANG

NOW = Moment(utc(1_770_000_000.0), 1000, 0)


def commit(hotkey: str, number: int, target: int, client: str = "here") -> Commit:
    request = CommitRequest(
        miner_hotkey=hotkey,
        commitment_hash=f"{number:064x}",
        target_sequence_length=512 + target,
        signature="s",
    )
    return Commit(request, client)


def shown(answer: Any) -> Any:
    if isinstance(answer, HTTPException):
        return answer.status_code, answer.detail
    return answer.model_dump()


def stored(url: str, goes: Sequence[Sequence[Commit]]) -> tuple[list[Any], list[Any]]:
    """Store the commitments, a transaction for each group; return all answers and rows."""
    storage, answers = Storage(url), []
    config = ApiConfig(database_url=url)

    def prepare(session: Any) -> None:
        for number, hotkey in enumerate(("a", "b")):
            session.add(Miner(hotkey=hotkey, uid=number, registered_at=NOW.now))
        rounds.current(session, NOW)
        for _ in range(5):
            bans.record_failure(session, "elsewhere", NOW.now)
        session.flush()
        for target in (7, 8):  # what is revealed stays where it is for a commitment's target
            revealed = {"tokens_per_sec": 1.0, "fork_url": "f", "commit_hash": "c"}
            row = Submission(
                miner_hotkey="a",
                round_id=1,
                target_sequence_length=512 + target,
                **{"signature": "", "created_at": NOW.now, "is_revealed": True, **revealed},
            )
            session.add(row)

    storage.write(prepare)
    for group in goes:
        found = storage.write(lambda session: commits.store(session, group, NOW, config))  # noqa: B023
        answers += [shown(one) for one in found]
    columns = (Submission.id, Submission.commitment_hash, Submission.withdrawn_at)
    with storage.read() as session:
        rows = [tuple(row) for row in session.execute(select(*columns).order_by(Submission.id))]
    storage.close()
    return answers, rows


def test_at_once_is_as_one_after_another(database_url: str, tmp_path: Path) -> None:
    """More than a hotkey may leave waiting, twice the same, a stranger, and a banned client."""
    many = [commit("a", n, target=1 + n % 13) for n in range(30)]
    others = [
        commit("b", 100, 1),
        commit("b", 100, 2),  # the same a second time
        commit("b", 3, 1),  # and another's
        commit("stranger", 101, 1),
        commit("b", 102, 1, client="elsewhere"),
        commit("b", 103, 1),  # takes the first one's place
    ]
    asked = [*many[:15], *others, *many[15:]]
    together = stored(database_url, [asked])
    alone = stored(f"sqlite:///{tmp_path / 'alone.db'}", [[one] for one in asked])
    assert together == alone
    answers, rows = together
    assert [one[0] for one in answers if isinstance(one, tuple)] == [409, 409, 404, 403]
    waiting = [row for row in rows if row[2] is None]
    assert len(waiting) == OPEN_A_HOTKEY + 1
    assert waiting[-1][1] == f"{29:064x}"


def test_one_of_many_identical_commitments_is_taken(api: LiveApi) -> None:
    api.register(BOB)
    keys = [ALICE, BOB] * 12
    bodies = [
        {**commitment(key, salt=str(n // 6)), "target_sequence_length": 512 + n}
        for n, key in enumerate(keys)
    ]
    with ThreadPoolExecutor(len(keys)) as crowd:
        sent = zip(bodies, keys, strict=True)
        replies = list(crowd.map(lambda one: api.post("/commit_submission", *one), sent))
    statuses = sorted(reply.status_code for reply in replies)
    assert statuses == [200] * 4 + [409] * 20  # four salts, whoever came first
    rows = [reply.json()["submission_id"] for reply in replies if reply.status_code == 200]
    pending = api.get("/pending_reveals")["pending_reveals"]
    assert sorted(row["submission_id"] for row in pending) == sorted(rows)


def test_what_a_hotkey_has_left_behind_is_not_read(tmp_path: Path) -> None:
    """Else one with a hundred thousand old rows would hold up everybody's commitments."""
    sent: list[tuple[str, Any]] = []

    def note(_: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        if "FROM submissions" in statement and "miner_hotkey IN" in statement:
            sent.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    stored(f"sqlite:///{tmp_path / 'api.db'}", [[commit("a", 1, 512)]])
    event.remove(Engine, "before_cursor_execute", note)
    ((statement, parameters),) = sent
    with closing(sqlite3.connect(tmp_path / "api.db")) as database:
        plan = database.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
    assert "USING INDEX ix_submissions_waiting" in str(plan)


def test_questions_wait_for_those_before_them_and_share_a_turn() -> None:
    turns: list[Sequence[int]] = []
    first_begun, go_on = threading.Event(), threading.Event()

    def serve(questions: Sequence[int]) -> list[int | Exception]:
        turns.append(questions)
        first_begun.set()
        assert go_on.wait(HANG)
        return [LookupError(one) if one % 10 == 7 else -one for one in questions]

    async def crowd() -> list[Any]:
        together = Together(serve)
        first = asyncio.create_task(together.ask(0))
        await asyncio.to_thread(first_begun.wait, HANG)
        rest = [asyncio.create_task(together.ask(n)) for n in range(1, MOST + 20)]
        await asyncio.sleep(0)
        rest[1].cancel()  # its client has gone; the others are answered
        go_on.set()
        found = await asyncio.gather(first, *rest, return_exceptions=True)
        assert await together.ask(1000) == -1000
        return found

    found = asyncio.run(crowd())
    assert [len(turn) for turn in turns] == [1, MOST, 19, 1]
    assert list(itertools.chain(*turns)) == [*range(MOST + 20), 1000]
    assert isinstance(found[2], asyncio.CancelledError)
    for number, answer in enumerate(found):
        if number % 10 == 7:
            assert isinstance(answer, LookupError)
        elif number != 2:
            assert answer == -number


def test_what_spoils_a_turn_is_everybodys_answer_and_the_next_goes_on() -> None:
    faults = [OSError("the database is away")]

    def serve(questions: Sequence[int]) -> list[int | Exception]:
        if faults:
            raise faults.pop()
        return list(questions)

    async def ask() -> None:
        together = Together(serve)
        both = await asyncio.gather(together.ask(1), together.ask(2), return_exceptions=True)
        assert [type(one) for one in both] == [OSError, OSError]
        assert await together.ask(3) == 3

    asyncio.run(ask())
