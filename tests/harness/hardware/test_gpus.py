"""What GPUs can do, against figures counted by hand."""

from __future__ import annotations

import pytest

from harness.hardware.gpus import GPUS, ceiling, known, longest, settings


def test_the_bound_of_an_h200_by_hand() -> None:
    gpu = known("NVIDIA H200")
    assert gpu is not None
    # four projections of 512 x 512, a gate of rank 64, and three products with 8 states of 64 x 64
    operations = 2 * (4 * 512 * 512 + 2 * 512 * 64 + 3 * 8 * 64 * 64)
    assert ceiling(gpu) == pytest.approx(989e12 / operations)
    assert ceiling(gpu) > 194e6, "what was measured there"


def test_a_card_without_bandwidth_is_bound_by_its_memory() -> None:
    gpu = known("NVIDIA L40S")
    assert gpu is not None
    assert ceiling(gpu) == pytest.approx(min(0.864e12 / (512 * 6), ceiling(gpu)))


@pytest.mark.parametrize(
    ("memory", "target"), [(141, 1_000_000), (24, 1_000_000), (8, 500_000), (0.5, 16_384)]
)
def test_what_fits_into_a_memory(memory: float, target: int) -> None:
    assert longest(memory) == target
    assert settings(memory)["TARGET_SEQUENCE_LENGTH"] == str(target)


def test_nothing_fits_into_nothing() -> None:
    assert longest(0.0) is None
    assert settings(0.0)["TARGET_SEQUENCE_LENGTH"] == "auto"


def test_every_card_has_a_target() -> None:
    assert all(longest(gpu.memory_gib) == 1_000_000 for gpu in GPUS)
    assert known("NVIDIA GeForce GT 710") is None
