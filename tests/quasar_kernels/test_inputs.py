"""The comparisons of the kernels' tests: a failure shows its error and its limit."""

from __future__ import annotations

import pytest
import torch

from tests.quasar_kernels.inputs import assert_close

GOOD = torch.linspace(-1, 1, 160, dtype=torch.float64).view(1, 80, 1, 2)


def changed(token: int, to: float) -> torch.Tensor:
    o = GOOD.clone()
    o[:, token] = to
    return o


@pytest.mark.parametrize(
    ("o", "limit", "words"),
    [
        (changed(3, float("nan")), 1.0, "2 of 160 values are not finite"),
        (GOOD * 1.25, 0.2, "relative RMS error 0.25, limit 0.2"),
        (changed(79, 0.0), 0.2, r"eighth 8 of the tokens: relative RMS error 0\.3\d+, limit 0\.21"),
        (changed(79, 0.0), 0.5, r"largest absolute error 1, limit 0\.1"),
        (-GOOD * 0.05, 9.0, None),
    ],
)
def test_a_failing_comparison_shows_its_error_and_its_limit(o, limit, words):
    if words is None:  # small values: only their direction is wrong
        o, wanted, words = o, GOOD * 0.05, r"cosine similarity -1\.000000, at least 0\.999"
    else:
        wanted = GOOD
    with pytest.raises(AssertionError, match=words):
        assert_close(o, wanted, limit)
