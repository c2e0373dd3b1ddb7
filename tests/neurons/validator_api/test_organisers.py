"""What organisers do by hand: lift bans and withdraw submissions; and the places in the queue."""

import re
from pathlib import Path

from neurons.validator_api.competition.lists import PACE
from tests.neurons.live_api import ALICE, BOB, VALIDATOR, Hotkey, LiveApi, commitment, serve
from tests.neurons.live_api import submission as body_of


def place(api: LiveApi, row: int) -> tuple[int | None, int, float | None]:
    shown = api.get(f"/queue_place/{row}")
    return shown["place"], shown["queued"], shown["estimated_seconds"]


def test_a_lifted_ban_ends_at_once_and_counting_starts_again(api: LiveApi) -> None:
    client = {"ip_address": f"hotkey {ALICE.hotkey}"}
    queued = api.submit(ALICE, 10.0)
    for _ in range(5):
        api.judge("/record_failure", client)
    assert api.refusal("/submit_kernel", body_of(ALICE, 11.0), ALICE)[0] == 403
    assert api.judge("/lift_ban", client)["message"] == "Ban lifted"
    assert place(api, queued)[0] is None  # the ban has withdrawn it
    again = api.submit(ALICE, 10.0)
    assert (again != queued, place(api, again)[0]) == (True, 1)
    for _ in range(4):
        api.judge("/record_failure", client)
    assert api.post("/commit_submission", commitment(ALICE), ALICE).status_code == 200


def test_there_may_be_no_ban_to_lift(api: LiveApi) -> None:
    for client in ("203.0.113.9", f"hotkey {BOB.hotkey}", "127.0.0.1", "nonsense"):
        status, detail = api.refused_verdict("/lift_ban", {"ip_address": client})
        assert (status, detail.startswith("No ban and no failures of ")) == (404, True), detail


def test_a_withdrawn_submission_leaves_the_queue_and_no_verdict_replaces_it(api: LiveApi) -> None:
    row = api.submit(ALICE, 10.0)
    body = {"submission_id": row, "reason": "sells its place\x1b"}
    api.judge("/withdraw_submission", body)
    assert api.queue()["submissions"] == []
    for path, late in (
        ("/mark_validated", {"submission_id": row, "score": 1.0}),
        ("/withdraw_submission", body),
    ):
        refused = (400, "Submission already judged by the organiser, who withdrew it")
        assert api.refused_verdict(path, late) == refused
    assert api.submit(ALICE, 10.0) == row  # the same claim again is the same submission
    text = api.http.get(f"/submissions/{row}", headers={"Accept": "text/html"}).text
    assert "Withdrawn by the organiser: sells its place</bdi>" in text  # without the escape
    (shown,) = api.get("/get_submission_stats")["top_performers"]
    assert (shown["score"], shown["rank"]) == (0.0, None)


def test_a_withdrawn_leader_loses_its_rank(api: LiveApi) -> None:
    cheat, honest = api.judged(ALICE, 99.0), api.judged(BOB, 10.0)
    api.judge("/withdraw_submission", {"submission_id": cheat})
    rows = api.get("/get_submission_stats")["top_performers"]
    assert {row["id"]: row["rank"] for row in rows} == {cheat: None, honest: 1}


def test_what_cannot_be_withdrawn(tmp_path: Path) -> None:
    other = Hotkey("//Other")
    with serve(tmp_path, validator_hotkeys=(VALIDATOR.hotkey, other.hotkey)) as api:
        api.register(ALICE)
        hidden, judged = api.commit(ALICE), api.judged(ALICE, 10.0, target=512)
        cases = {(hidden, VALIDATOR): 409, (judged, other): 400, (10**6, VALIDATOR): 404}
        for (row, key), status in cases.items():
            refused = api.refused_verdict("/withdraw_submission", {"submission_id": row}, key)
            assert refused[0] == status, refused


def test_a_place_moves_up_and_its_wait_follows_the_last_verdicts(api: LiveApi) -> None:
    keys = [Hotkey(f"//Miner{n}") for n in range(4)]
    for key in keys:
        api.register(key)
    rows = [api.submit(key, 10.0) for key in keys]
    assert [place(api, row) for row in rows] == [(n, 4, None) for n in (1, 2, 3, 4)]
    api.mark(rows[0], 1.0)
    assert place(api, rows[0]) == (None, 3, None)
    assert place(api, rows[3]) == (3, 3, None)  # one verdict shows no pace
    api.clock.now += 90
    api.mark(rows[2], 0.0)
    assert [place(api, row) for row in (rows[1], rows[3])] == [(1, 2, 90.0), (2, 2, 180.0)]
    text = api.http.get(f"/submissions/{rows[3]}", headers={"Accept": "text/html"}).text
    assert re.search(r"Place in the queue</dt><dd>2 of 2, about 3 min</dd>", text), text
    judged = api.http.get(f"/submissions/{rows[0]}", headers={"Accept": "text/html"}).text
    assert "Place in the queue" not in judged


def test_a_long_pause_does_not_raise_the_estimate(api: LiveApi) -> None:
    for n in range(4):
        api.clock.now += 86_400 if n == 2 else 60
        api.judged(ALICE, 10.0 + n, target=512 + n)
    row = api.submit(ALICE, 99.0, target=4096)
    assert place(api, row) == (1, 1, 60.0)
    assert PACE > 4


def test_a_hidden_commitment_and_an_unknown_number_have_no_place(api: LiveApi) -> None:
    assert place(api, api.commit(ALICE)) == (None, 0, None)
    for number in ("7", "999999999999", "x"):
        assert api.http.get(f"/queue_place/{number}").status_code in (404, 422)
