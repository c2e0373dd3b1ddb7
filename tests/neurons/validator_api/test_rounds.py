"""Rounds, ranking and weights."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from neurons.runtime.settings import Settings
from neurons.validator_api.competition import ranking, rounds
from neurons.validator_api.competition.ranking import Ranked
from neurons.validator_api.competition.rounds import Transaction
from neurons.validator_api.database.storage import Storage
from neurons.validator_api.database.tables import ACTIVE, COMPLETED, Miner, Round, Submission
from neurons.wire.protocol import HIGHEST_CLAIM
from tests import postgresql
from tests.neurons import live_api
from tests.neurons.live_api import ALICE, BLOCKS, BOB, Hotkey, LiveApi
from tests.postgresql import on_both

CAROL, DAVE, EVE = Hotkey("//Carol"), Hotkey("//Dave"), Hotkey("//Eve")
START = datetime(2026, 1, 1)  # noqa: DTZ001 — the wire is naive UTC
HOURS = 3600.0

Row = tuple[int, str, float, dict[str, Any]]


def row(number: int, hotkey: str, speed: float, **changes: Any) -> Row:
    return number, hotkey, speed, changes


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def storage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Storage]:
    """A database of each kind; the rows of each test are rolled back."""
    url = f"sqlite:///{tmp_path_factory.mktemp('ranking') / 'api.db'}"
    if request.param == "postgresql":
        server: postgresql.Server = request.getfixturevalue("server")
        url = server.new_database()
    with closing(Storage(url)) as opened:
        yield opened


class Standing:
    """Ranks the rows of round 2."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, rows: Sequence[Row], baseline: Row | None = None) -> list[Ranked]:
        session = self.session
        listed = [(2, one) for one in rows]
        listed += [(1, baseline)] if baseline else []
        for uid, hotkey in enumerate(sorted({one[1] for _, one in listed})):
            session.add(Miner(hotkey=hotkey, uid=uid, registered_at=START))
        session.flush()
        times = {"start_time": START, "end_time": START + timedelta(hours=48)}
        for number, status in ((1, COMPLETED), (2, ACTIVE)):
            numbers = {"id": number, "round_number": number}
            session.add(Round(**numbers, status=status, ranking="claim", **times))
        session.flush()
        for round_id, (number, hotkey, speed, changes) in listed:
            values: dict[str, Any] = {
                "id": number,
                "miner_hotkey": hotkey,
                "round_id": round_id,
                "signature": "",
                "tokens_per_sec": speed,
                "target_sequence_length": 300_000,
                "is_revealed": True,
                "validated_at": START,
                "score": 1.0,
                "created_at": START + timedelta(seconds=number),
            }
            session.add(Submission(**values | changes))
        active = session.get_one(Round, 2)
        active.baseline_submission_id = baseline[0] if baseline else None
        session.flush()
        ranked = ranking.current(session, active)
        of_round = session.scalars(select(Submission).where(Submission.round_id == 2)).all()
        ranks = {place.submission.id: place.rank for place in ranked}
        assert ranking.ranks_of(session, of_round) == ranks
        assert ranking.current(session, active, 2) == ranked[:2]
        return ranked


@pytest.fixture
def standing(storage: Storage) -> Iterator[Standing]:
    with storage.read() as session:
        yield Standing(session)


def order(ranked: list[Ranked]) -> list[int]:
    return [place.submission.id for place in ranked]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(
            [row(2, "b", 290.0), row(1, "a", 100.0, target_sequence_length=1_000_000)],
            [1, 2],
            id="the weighted score decides, not the speed",
        ),
        pytest.param(
            [
                row(3, "c", 100.0, created_at=START),
                row(1, "a", 100.0, created_at=START + timedelta(hours=1)),
                row(2, "b", 100.0, created_at=START),
            ],
            [2, 3, 1],
            id="ties: the earlier commit, then the lower id",
        ),
        pytest.param(
            [
                row(1, "a", 1.7e308, target_sequence_length=1_000_000),  # the product overflows
                row(2, "b", 1.0),
                row(3, "c", HIGHEST_CLAIM),
            ],
            [3, 2],
            id="no claim above the limit",
        ),
        *(
            pytest.param([row(1, "a", 900.0, **change), row(2, "b", 1.0)], [2], id=str(change))
            for change in (
                {"score": 0.0},
                {"score": None},
                {"validated_at": None},
                {"is_revealed": False},
                {"verification_passed": False},
            )
        ),
    ],
)
def test_which_submissions_rank_and_in_which_order(standing, rows, expected):
    assert order(standing(rows)) == expected


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        (row(9, "z", 100.0), [3]),
        (row(9, "z", 1.7e308), [3, 2, 1]),  # above the limit
        (row(9, "z", 500.0, score=0.0), [3, 2, 1]),  # since refuted
    ],
)
def test_only_claims_above_a_valid_baseline_rank(standing, baseline, expected):
    rows = [row(1, "a", 99.0), row(2, "b", 100.0), row(3, "c", 101.0)]
    assert order(standing(rows, baseline=baseline)) == expected


def test_a_hotkey_earns_once_and_does_not_push_others_down(standing: Standing) -> None:
    rows = [row(1, "a", 9.0), row(2, "a", 8.0), row(3, "b", 7.0), row(4, "a", 6.0)]
    ranks = [(1, 1, 0.60), (2, 1, 0.0), (3, 2, 0.25), (4, 2, 0.0)]
    assert [(p.submission.id, p.rank, p.weight) for p in standing(rows)] == ranks


def test_a_completed_round_keeps_its_uids(standing: Standing) -> None:
    def uids(of_chain: dict[str, int]) -> list[tuple[int, str]]:
        return [(one.uid, one.hotkey) for one in rounds.weights(transaction(of_chain), 2).weights]

    def transaction(of_chain: dict[str, int]) -> Transaction:
        return Transaction(standing.session, START, 2, Settings(), of_chain)

    standing([row(1, "a", 2.0), row(2, "b", 1.0)])
    assert uids({"a": 5}) == [(5, "a")]  # the chain does not know b
    rounds.finalize(transaction({"a": 7}), standing.session.get_one(Round, 2))
    assert uids({"a": 9, "b": 8}) == uids({}) == [(7, "a")]


def test_the_first_request_opens_a_round_of_48_hours(api: LiveApi) -> None:
    times = {"start_time": "2026-02-02T02:40:00", "end_time": "2026-02-04T02:40:00"}
    numbers = {"id": 1, "round_number": 1, "total_submissions": 0, "wire_version": 2}
    nobody = dict.fromkeys(("baseline_submission_id", "winner_hotkey"))
    state = {"status": "active", "time_remaining_seconds": 48 * 3600, "ranking": "verified"}
    assert api.get("/get_current_round") == {**times, **numbers, **nobody, **state}
    api.clock.now += HOURS
    again = api.get("/get_current_round")
    assert (again["id"], again["time_remaining_seconds"]) == (1, 47 * 3600)
    api.clock.now += 47 * HOURS - 0.5
    last = api.get("/get_current_round")
    assert (last["id"], last["time_remaining_seconds"]) == (1, 0)


@on_both
def test_a_completed_round_has_a_winner_which_is_the_next_baseline(api: LiveApi) -> None:
    api.judged(ALICE, 100.0)
    best = api.judged(BOB, 200.0)
    assert (api.weights(), api.get("/get_current_round")["total_submissions"]) == ([], 2)
    api.clock.now += 48 * HOURS
    following = api.get("/get_current_round")
    assert following["total_submissions"] == 0
    assert (following["round_number"], following["baseline_submission_id"]) == (2, best)
    assert [row["uid"] for row in api.get("/get_weights")["weights"]] == [1, 0]
    first = [(BOB.hotkey, 0.60), (ALICE.hotkey, 0.25)]
    assert api.weights() == first
    best = [api.judged(key, speed) for key, speed in ((ALICE, 200.0), (BOB, 207.0))][1]
    for _ in ("active", "completed"):
        assert api.weights(round_id=2) == [(BOB.hotkey, 0.60)]
        api.clock.now += 48 * HOURS
    assert api.weights(round_id=1) == first
    last = api.get("/get_current_round")  # round 3 had no winner, so the baseline remains
    assert (last["round_number"], last["baseline_submission_id"]) == (4, best)


@on_both
def test_finalize(api: LiveApi) -> None:
    for speed, key in enumerate((ALICE, BOB, CAROL, DAVE, EVE), start=1):
        api.judged(key, float(speed))
    api.judged(ALICE, 1e9, score=0.0)
    final = api.judge("/finalize_round/1", {})
    assert (final["status"], final["round_id"], final["winner"]) == ("completed", 1, EVE.hotkey)
    assert [(r["rank"], r["miner_hotkey"], r["league"]) for r in final["rankings"]] == [
        (rank, key.hotkey, "100k") for rank, key in enumerate((EVE, DAVE, CAROL, BOB), start=1)
    ]
    assert [weight for _, weight in api.weights()] == [0.60, 0.25, 0.10, 0.05]
    shown = api.get("/get_submission_stats")["top_performers"]  # while no round is active
    assert [one["rank"] for one in shown] == [1, 2, 3, 4, 5, None]
    assert api.refused_verdict("/finalize_round/1", {}) == (400, "Round already finalized")
    assert api.refused_verdict("/finalize_round/7", {}) == (404, "Round not found")


def test_create_round_ends_the_active_one(api: LiveApi) -> None:
    row = api.judged(ALICE, 5.0)
    created = api.judge("/create_round", {"duration_hours": 2})
    assert (created["round_number"], created["time_remaining_seconds"]) == (2, 7200)
    assert created["baseline_submission_id"] == row
    assert api.weights(round_id=1) == [(ALICE.hotkey, 0.60)]
    assert api.refused_verdict("/create_round", {"baseline_submission_id": 77})[0] == 404
    assert api.refused_verdict("/create_round", {"duration_hours": 0})[0] == 422


def test_a_reveal_after_the_round_ranks_in_the_next_by_the_time_of_its_commit(tmp_path):
    with live_api.serve(tmp_path, ranking="claim") as api:
        api.register(ALICE)
        api.judged(BOB, 900.0)
        api.clock.now += 48 * HOURS - 60
        early = api.commit(ALICE)
        api.clock.now += 59
        late = api.submit(BOB, 1000.0)
        api.clock.now += 1 + BLOCKS * 12
        api.reveal(ALICE, early)
        for submission in (late, early):
            api.mark(submission, 1.0)
        assert api.weights(round_id=1) == [(BOB.hotkey, 0.60)]
        assert [hotkey for hotkey, _ in api.weights(round_id=2)] == [ALICE.hotkey, BOB.hotkey]


@on_both
def test_later_verdicts_do_not_change_a_completed_round(api: LiveApi) -> None:
    first, second = api.judged(ALICE, 20.0), api.judged(BOB, 10.0, score=0.0)
    api.clock.now += 48 * HOURS
    api.get("/get_current_round")
    rows = {row["id"]: row for row in api.get("/get_submission_stats")["top_performers"]}
    assert (rows[first]["rank"], rows[first]["score"]) == (1, 1.0)
    assert (rows[second]["rank"], rows[second]["score"]) == (None, 0.0)
    assert rows[second]["validated"]
    api.mark(second, 1.0)
    api.mark(first, 0.0)
    assert api.weights(round_id=1) == [(ALICE.hotkey, 0.60)]


def test_a_verdict_after_the_planned_end_counts_in_the_next_round(api: LiveApi) -> None:
    row = api.judged(ALICE, 20.0, score=0.0)
    api.clock.now += 48 * HOURS
    api.mark(row, 1.0)  # the first call after the end
    assert (api.weights(round_id=1), api.get("/get_current_round")["round_number"]) == ([], 2)


@on_both
def test_open_submissions_move_to_the_next_round_until_they_expire(api: LiveApi) -> None:
    api.register(BOB)
    row = api.commit(ALICE)
    api.pass_blocks(BLOCKS + 300)  # the last block for its reveal
    api.judge("/create_round", {"duration_hours": 2})
    api.reveal(ALICE, row)
    api.commit(BOB, "other")
    api.pass_blocks(BLOCKS + 301)
    assert api.judge("/create_round", {"duration_hours": 2})["total_submissions"] == 1
    api.mark(row, 1.0)
    api.judge("/finalize_round/3", {})
    assert api.weights() == [(ALICE.hotkey, 0.60)]
