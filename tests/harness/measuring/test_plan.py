"""Plans: the missing samples, and the failures that follow from others."""

from __future__ import annotations

import pytest

from harness.claim import RUNS_MOST
from harness.measuring.plan import FIRST_RUNS, FURTHER_RUNS, EachLength, ForClaim
from harness.sample import Failure, Kind, Sample
from tests.harness.samples import make_sample

NO_MEMORY: frozenset[Kind] = frozenset({"out_of_memory"})


def failure(length: int, kind: Kind = "out_of_memory") -> Failure:
    return Failure(length=length, kind=kind, reason="it failed")


def samples_of(*lengths: int) -> list[Sample]:
    return [make_sample(length) for length in lengths]


def noisy(runs: int) -> list[Sample]:
    return [make_sample(2048, 1000.0 + 100.0 * (n % 2)) for n in range(runs)]


def test_each_length_needs_the_same_number_of_samples() -> None:
    plan = EachLength((1024, 512, 512), runs=2)
    assert plan.missing([], []) == [512, 512, 1024, 1024]
    assert plan.missing(samples_of(1024, 512, 512, 512, 2048), []) == [1024]
    assert plan.missing([], [failure(512)]) == [1024, 1024]


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
    assert all("not tried, as" in one.reason for one in result)


@pytest.mark.parametrize(
    ("samples", "changes", "target"),
    [
        ([], {}, FIRST_RUNS),
        ([], {"runs": 7}, 7),
        ([], {"at_once": 14}, 12),  # two processes sample the other lengths
        ([], {"at_once": 14, "most": 3}, 3),
        (samples_of(2048), {"at_once": 14}, FIRST_RUNS - 1),
        (samples_of(*[2048] * FIRST_RUNS), {}, 0),
        (samples_of(*[2048] * FIRST_RUNS), {"confirming": FIRST_RUNS}, 1),
        (samples_of(*[2048] * 6), {"confirming": FIRST_RUNS, "most": 5}, 0),
        (noisy(FIRST_RUNS), {}, FURTHER_RUNS),
        (noisy(RUNS_MOST - 1), {}, 1),
        (noisy(RUNS_MOST), {}, 0),
    ],
)
def test_the_target_is_sampled_until_its_noise_is_known(samples, changes, target):
    plan = ForClaim(2048, (512, 1024, 2048), **changes)
    assert plan.missing(samples, []) == [512, 1024] + [2048] * target
    assert plan.missing([*samples_of(512, 512, 1024), *samples], []) == [2048] * (
        target if samples or "at_once" not in changes or "most" in changes else target + 2
    )


def test_the_target_fails_with_a_length_that_validators_time_too() -> None:
    plan = ForClaim(1024, (512, 1024, 2048))
    (implied,) = plan.implied([failure(2048)])
    assert (implied.length, implied.kind) == (1024, "out_of_memory")
    assert implied.reason == "2048 tokens, which validators time too, failed: it failed"
    assert plan.missing([], [failure(2048), implied]) == []
    assert plan.implied([failure(2048), implied]) == plan.implied([failure(4096)]) == []
