"""Plans: the missing samples, and the failures that follow from others."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.claim import MAX_RUNS
from harness.measuring.plan import FIRST_RUNS, FURTHER_RUNS, EachLength, ForClaim
from harness.sample import Failure, Kind

NO_MEMORY: frozenset[Kind] = frozenset({"out_of_memory"})


def failure(length: int, kind: Kind = "out_of_memory") -> Failure:
    return Failure(length=length, kind=kind, reason="it failed")


def test_each_length_needs_the_same_number_of_samples() -> None:
    plan = EachLength((1024, 512, 512), runs=2)
    assert plan.missing(Counter(), (), []) == [512, 512, 1024, 1024]
    assert plan.missing(Counter({512: 3, 1024: 1, 2048: 1}), (), []) == [1024]
    assert plan.missing(Counter(), (), [failure(512)]) == [1024, 1024]


@pytest.mark.parametrize(
    ("failures", "implied"),
    [
        ([], []),
        ([failure(1024)], [2048]),
        ([failure(2048)], []),
        ([failure(1024), failure(512)], [2048]),
        ([failure(512, "crash")], []),
    ],
)
def test_lengths_above_one_that_is_too_long_fail(failures, implied):
    plan = EachLength((512, 1024, 2048), too_long=NO_MEMORY)
    result = plan.implied(failures)
    assert [one.length for one in result] == implied
    assert all("not tried, because" in one.reason for one in result)


@pytest.mark.parametrize(
    ("runs", "settled", "changes", "target"),
    [
        (0, False, {}, FIRST_RUNS),
        (0, False, {"runs": 7}, 7),
        (0, False, {"at_once": 14}, 12),  # two processes sample the other lengths
        (0, False, {"at_once": 14, "most": 3}, 3),
        (1, False, {"at_once": 14}, FIRST_RUNS - 1),
        (FIRST_RUNS, True, {}, 0),
        (FIRST_RUNS, True, {"confirming": FIRST_RUNS}, 1),
        (6, True, {"confirming": FIRST_RUNS, "most": 5}, 0),
        (FIRST_RUNS, False, {}, FURTHER_RUNS),
        (MAX_RUNS - 1, False, {}, 1),
        (MAX_RUNS, False, {}, 0),
    ],
)
def test_the_target_is_sampled_until_its_noise_is_known(runs, settled, changes, target):
    plan, sampled = ForClaim(2048, (512, 1024, 2048), **changes), Counter({2048: runs})
    known = {2048} if settled else ()
    assert plan.missing(sampled, known, []) == [512, 1024] + [2048] * target
    sampled.update([512, 512, 1024])
    assert plan.missing(sampled, known, []) == [2048] * (
        target if runs or "at_once" not in changes or "most" in changes else target + 2
    )


def test_the_target_fails_with_a_length_that_validators_time_too() -> None:
    plan = ForClaim(1024, (512, 1024, 2048))
    (implied,) = plan.implied([failure(2048)])
    assert (implied.length, implied.kind) == (1024, "out_of_memory")
    assert implied.reason == "2048 tokens, which validators time too, failed: it failed"
    assert plan.missing(Counter(), (), [failure(2048), implied]) == []
    assert plan.implied([failure(2048), implied]) == plan.implied([failure(4096)]) == []
