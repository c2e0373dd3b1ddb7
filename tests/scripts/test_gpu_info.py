"""The output of scripts/gpu_info.py for this machine's GPU and for other cards."""

import sys

import gpu_info
import pytest

from harness.hardware.gpus import GPUS, best_target
from tests.harness.samples import environment


@pytest.mark.parametrize(
    ("name", "memory_gib", "capability", "shown", "absent"),
    [
        pytest.param(
            *("NVIDIA GeForce RTX 4090", 23.5, "8.9"),
            ["Estimates, not measurements", *(gpu.label for gpu in GPUS)],
            "neither its speed",
            id="a known card gets an estimate and settings",
        ),
        pytest.param(
            *("NVIDIA RTX A2000", 5.7, "8.6", ["neither its speed nor its bound"], "Estimate at"),
            id="an unknown card gets settings but no estimate",
        ),
        pytest.param(
            *("NVIDIA A30", 1.2, "8.0"),
            ["too small for every target; use a larger GPU or MIG slice"],
            "TARGET_SEQUENCE_LENGTH",
            id="a card that is too small gets no settings",
        ),
    ],
)
def test_the_output_for_a_card(
    monkeypatch, capsys, name, memory_gib, capability, shown, absent
) -> None:
    card = {"gpu": name, "gpu_memory_mb": memory_gib * 1024, "compute_capability": capability}
    monkeypatch.setattr(gpu_info, "probe", lambda: environment(device="cuda", **card))
    monkeypatch.setattr(sys, "argv", ["gpu_info.py"])
    assert gpu_info.main() == 0
    text, best = capsys.readouterr().out, best_target(memory_gib, capability)
    assert [words for words in shown if words not in text] == []
    assert absent not in text
    assert (f"Estimate at {best or 0:,} tokens" in text) is ("4090" in name)
    assert (f"TARGET_SEQUENCE_LENGTH={best}" in text) is ("A30" not in name)
