"""The subnet's rules: blocks and leagues against manual values."""

from __future__ import annotations

import pytest

from neurons.wire import rules


def test_a_block_is_twelve_seconds_since_2021() -> None:
    assert rules.block_at(1_609_459_200.0) == 0
    assert rules.block_at(1_609_459_211.9) == 0
    assert rules.block_at(1_609_459_212.0) == 1
    assert rules.block_at(1_609_459_212.0, block_seconds=1) == 12
    assert rules.block_at(1_609_459_176.0) == -2  # the clock was never set


@pytest.mark.parametrize(
    ("length", "league"),
    [
        (-1, ("100k", 0.5)),
        (199_999, ("100k", 0.5)),
        (200_000, ("200k", 0.75)),
        (999_999, ("900k", 2.5)),
        (1_000_000, ("1M", 3.0)),
    ],
)
def test_leagues_include_their_lower_bound(length: int, league: tuple[str, float]) -> None:
    assert rules.league_of(length) == league
    assert rules.weighted_score(10.0, length) == 10.0 * league[1]
