"""How far repeated speeds spread."""

from __future__ import annotations

import pytest

from harness.stats import spread


def test_spread_is_relative_to_the_slowest() -> None:
    assert spread([100.0, 125.0, 110.0]) == pytest.approx(0.25)
    assert spread([42.0]) == 0


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, float("nan")], [-1.0]])
def test_spread_refuses_what_is_no_speed(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        spread(values)
