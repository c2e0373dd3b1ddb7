"""The lengths to measure on each device."""

from __future__ import annotations

import pytest

from harness.workload import CPU_LIMIT, LENGTHS, VALIDATOR_LENGTHS, lengths_for


@pytest.mark.parametrize(
    ("target", "device", "lengths"),
    [
        (300, "cuda", (300, *VALIDATOR_LENGTHS)),
        (3000, "cuda", (*VALIDATOR_LENGTHS, 3000)),
        (1_000_000, "cuda", LENGTHS),
        (300, "cpu", (300, *VALIDATOR_LENGTHS)),
        (CPU_LIMIT + 1, "cpu", VALIDATOR_LENGTHS),
    ],
)
def test_the_lengths_for_a_target(target: int, device: str, lengths: tuple[int, ...]) -> None:
    assert lengths_for(target, device) == lengths
