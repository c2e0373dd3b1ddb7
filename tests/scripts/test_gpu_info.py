"""The output of scripts/gpu_info.py for this machine's GPU and for other cards."""

from __future__ import annotations

import sys

import gpu_info
import pytest

from harness.hardware.gpus import GPUS, best_target
from tests.harness.samples import environment


def printed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str | None,
    memory_gib: float,
    capability: str,
) -> str:
    machine = environment(
        device="cuda",
        gpu=name,
        gpu_memory_mb=memory_gib * 1024,
        compute_capability=capability,
    )
    monkeypatch.setattr(gpu_info, "probe", lambda: machine)
    monkeypatch.setattr(sys, "argv", ["gpu_info.py"])
    assert gpu_info.main() == 0
    return capsys.readouterr().out


def test_a_known_card_gets_an_estimate_and_settings(monkeypatch, capsys) -> None:
    text = printed(monkeypatch, capsys, "NVIDIA GeForce RTX 4090", 23.5, "8.9")
    assert f"Estimate at {best_target(23.5, '8.9'):,} tokens" in text
    assert f"TARGET_SEQUENCE_LENGTH={best_target(23.5, '8.9')}" in text
    assert "Estimates, not measurements" in text
    assert all(gpu.label in text for gpu in GPUS)


def test_an_unknown_card_gets_settings_but_no_estimate(monkeypatch, capsys) -> None:
    text = printed(monkeypatch, capsys, "NVIDIA RTX A2000", 5.7, "8.6")
    assert "neither its speed nor its bound" in text
    assert "Estimate at" not in text
    assert f"TARGET_SEQUENCE_LENGTH={best_target(5.7, '8.6')}" in text


def test_a_card_that_is_too_small_gets_no_settings(monkeypatch, capsys) -> None:
    text = printed(monkeypatch, capsys, "NVIDIA A30", 1.2, "8.0")
    assert "too small for every target; use a larger GPU or MIG slice" in text
    assert "TARGET_SEQUENCE_LENGTH" not in text
