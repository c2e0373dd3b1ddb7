"""The targets that fit into a GPU's memory, by an estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.hardware.gpus import best_target, fits
from neurons.miner.targets import targets_here
from neurons.runtime.errors import Held
from tests.harness.samples import environment
from tests.neurons.miner.parts import make_settings


def on_gpu(memory_gib: float, capability: str = "8.9") -> Any:
    return environment(
        device="cuda",
        gpu="a card",
        gpu_memory_mb=memory_gib * 1024,
        compute_capability=capability,
    )


@pytest.mark.parametrize("memory_gib", [141, 8])
def test_auto_starts_with_the_highest_league_that_fits(tmp_path: Path, memory_gib: float) -> None:
    targets = targets_here(None, on_gpu(memory_gib), make_settings(tmp_path))
    assert targets[0] == best_target(memory_gib, "8.9")
    assert all(fits(n, memory_gib, "8.9") for n in targets)


def test_a_target_that_cannot_fit_is_held_with_the_longest_one_that_does(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, target_sequence_length=1_000_000)
    with pytest.raises(Held) as caught:
        targets_here(1_000_000, on_gpu(5), settings)
    assert "TARGET_SEQUENCE_LENGTH=1000000 is too long for a card" in caught.value.reason
    best = best_target(5, "8.9")
    assert f"Set TARGET_SEQUENCE_LENGTH to {best} or less, or to auto" in caught.value.remedy
    with pytest.raises(Held, match="Use a GPU or a MIG slice with more memory"):
        targets_here(1_000_000, on_gpu(1), settings)


@pytest.mark.parametrize("memory_gib", [11, 141])
def test_a_target_that_may_fit_is_measured(tmp_path: Path, memory_gib: float) -> None:
    settings = make_settings(tmp_path, target_sequence_length=1_000_000)
    assert targets_here(1_000_000, on_gpu(memory_gib), settings) == (1_000_000,)


@pytest.mark.parametrize("changes", [{"fork_scope": "ops"}, {"repo_path": Path("/fork")}])
def test_the_estimate_is_for_the_published_layer_alone(tmp_path, changes):
    settings = make_settings(tmp_path, **changes)
    assert targets_here(1_000_000, on_gpu(8), settings) == (1_000_000,)
