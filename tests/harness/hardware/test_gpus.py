"""The bounds and the targets of known GPUs."""

from __future__ import annotations

import pytest

from harness.hardware.gpus import GPUS, HIGHEST, LEAGUE, best_target, known, settings
from neurons.wire.rules import LEAGUES


def test_a_mig_slice_has_its_share_of_the_card() -> None:
    card, mig = known("NVIDIA A100-SXM4-80GB"), known("NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    assert card is not None
    assert mig is not None
    assert (mig.memory_gib, mig.bandwidth) == (40, card.bandwidth / 2)
    assert mig.operations == pytest.approx(card.operations * 3 / 7)


@pytest.mark.parametrize(
    ("memory", "capability", "target"),
    [
        (141, "9.0", 1_000_000),
        (24, "8.9", 1_000_000),
        (6, "9.0", 400_000),
        (2, "9.0", 16_384),
        (1.3, "9.0", None),
    ],
)
def test_the_best_target_for_a_memory(memory: float, capability: str, target: int | None) -> None:
    assert best_target(memory, capability) == target
    assert settings(memory, capability)["TARGET_SEQUENCE_LENGTH"] == str(target or "auto")


def test_targets_are_the_beginnings_of_leagues() -> None:
    assert [least for least, _, _ in LEAGUES[1:]] == [*range(2 * LEAGUE, HIGHEST + 1, LEAGUE)]


def test_every_known_card_reaches_the_highest_league() -> None:
    assert all(best_target(gpu.memory_gib, gpu.capability) == HIGHEST for gpu in GPUS)
    assert known("NVIDIA GeForce GT 710") is None
