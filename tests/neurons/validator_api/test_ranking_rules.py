"""The two rules of a round: copies, results that count as equal, and which rule applies."""

import random
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from neurons.validator_api.competition.ranking import _best_first, _Entry
from neurons.wire import protocol, rules
from tests.neurons import live_api
from tests.neurons.live_api import ALICE, BLOCKS, BOB, Hotkey, LiveApi, bound
from tests.postgresql import on_both

COPY = "https://github.com/bob/flash-linear-attention"
START = datetime(2026, 1, 1)  # noqa: DTZ001 — as in the database
ROUND = 48 * 3600.0


@pytest.mark.parametrize(("rule", "first"), [("verified", ALICE), ("claim", BOB)])
def test_a_copy_that_claims_a_tenth_more(tmp_path: Path, rule: str, first: Hotkey) -> None:
    """Both have the same code, for which the validator measures 1,000 tokens/s."""
    with live_api.serve(tmp_path, ranking=rule) as api:
        api.judged(ALICE, 1000.0)
        api.clock.now += 60
        copy = api.judged(BOB, 1100.0, score=1000 / 1100, fork=COPY)
        weights = api.get("/get_weights", round_id=1)
        assert weights["ranking"] == api.get("/get_current_round")["ranking"] == rule
        assert weights["weights"][0]["hotkey"] == first.hotkey
        api.clock.now += ROUND
        assert api.get("/get_current_round")["baseline_submission_id"] == (
            1 if first is ALICE else copy
        )
        # nor does a copy in the next round, if measurement noise favours it by 2%
        if rule == "verified":
            api.judged(BOB, 1100.0, score=1020 / 1100, fork=COPY, commit="b" * 40)
            assert api.weights(round_id=2) == []


@on_both
def test_an_early_commitment_to_a_fork_wins_no_tie_by_code_copied_later(api: LiveApi) -> None:
    """Version 1 does not bind the commit: it can become public code between commit and reveal."""
    api.register(BOB)
    early = api.commit(BOB, fork=COPY)
    api.clock.now += 60
    original = api.submit(ALICE, 1000.0)
    api.pass_blocks(BLOCKS)
    body = live_api.revelation(BOB, early, fork=COPY)
    api.ok("/reveal_submission", body, BOB)
    for row in (original, early):
        api.mark(row, 1.0)
    assert [one for one, _ in api.weights(round_id=1)] == [ALICE.hotkey, BOB.hotkey]


def test_a_commitment_that_binds_the_code_wins_ties_by_its_time(api: LiveApi) -> None:
    api.register(BOB)
    body = live_api.revelation(BOB, 0, fork=COPY)
    claim = protocol.ClaimRequest(**body)
    commitment = {
        "miner_hotkey": BOB.hotkey,
        "commitment_hash": protocol.bound_commitment("salt", 100_000, claim),
        "target_sequence_length": 100_000,
    }
    early = api.ok("/commit_submission", bound(BOB, "/commit_submission", commitment), BOB)
    api.clock.now += 60
    later = api.submit(ALICE, 1000.0)
    api.pass_blocks(BLOCKS)
    body |= {"submission_id": early["submission_id"]}
    api.ok("/reveal_submission", bound(BOB, "/reveal_submission", body), BOB)
    for row in (later, early["submission_id"]):
        api.mark(row, 1.0)
    assert [one for one, _ in api.weights(round_id=1)] == [BOB.hotkey, ALICE.hotkey]


def test_a_submission_passes_an_original_only_with_a_result_over_3_percent_higher() -> None:
    draw = random.Random(1)
    for rule, share in rules.EQUAL_WITHIN.items():
        for count in range(40):
            results = [round(draw.uniform(100, 112), 1) for _ in range(count)]
            originals: dict[int, float] = {}
            counts_as = {}
            for number, result in enumerate(results):
                equal = [one for one in originals.values() if not differ(one, result, share)]
                counts_as[number] = min(equal, default=result)
                if not equal:
                    originals[number] = result
            expected = sorted(counts_as, key=lambda number: (-counts_as[number], number))
            found = [one.id for one in _best_first(entries(results), rule)]
            assert found == expected, (rule, results)
            assert not found or found[0] in originals
            for number, result in originals.items():
                passed = found[: found.index(number)]
                newer = [results[one] for one in passed if one > number]
                assert all(differ(one, result, share) for one in newer), (rule, results)


def differ(one: float, other: float, share: float) -> bool:
    return max(one, other) * (1.0 - share) > min(one, other)


def entries(results: list[float]) -> list[_Entry]:
    """Return submissions with these results, the oldest first."""
    return [
        _Entry(START + timedelta(seconds=number), number, f"{number}", result, result)
        for number, result in enumerate(results)
    ]


def test_a_changed_rule_applies_from_the_next_round(tmp_path: Path) -> None:
    shown = []
    for setting in (None, "claim", None):
        with live_api.serve(tmp_path, ranking=setting) as api:
            shown.append(api.get("/get_current_round")["ranking"])
            api.judge("/create_round", {})
            shown.append(api.get("/get_current_round")["ranking"])
    assert shown == ["verified", "verified", "verified", "claim", "claim", "claim"]


def test_the_page_names_the_rule(api: LiveApi) -> None:
    api.judged(ALICE, 1000.0)
    assert "the measured speed if that is lower" in api.http.get("/").text


@pytest.mark.parametrize("named", [None, "newer rule", 7, ["verified"]])
def test_an_unknown_rule_is_read_as_claim(named: object) -> None:
    assert protocol.Weights(epoch=1, ranking=named).ranking == "claim"
    assert protocol.Weights(epoch=1).ranking == "claim"
    assert protocol.Weights(epoch=1, ranking="verified").ranking == "verified"
