"""The targets that fit into a GPU's memory, by an estimate."""

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
        device="cuda", gpu="a card", gpu_memory_mb=memory_gib * 1024, compute_capability=capability
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


@pytest.mark.parametrize(
    ("memory_gib", "changes"),
    [(11, {}), (141, {}), (8, {"fork_scope": "ops"}), (8, {"repo_path": Path("/fork")})],
)
def test_a_target_is_measured_if_it_may_fit_or_the_layer_is_anothers(tmp_path, memory_gib, changes):
    settings = make_settings(tmp_path, target_sequence_length=1_000_000, **changes)
    assert targets_here(1_000_000, on_gpu(memory_gib), settings) == (1_000_000,)
