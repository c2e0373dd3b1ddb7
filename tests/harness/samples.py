"""Samples with invented figures, for the tests of pure functions."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from harness.hardware.machine import Environment, Snapshot, Telemetry
from harness.sample import Check, Correctness, Sample

DIGEST = "d" * 64


def environment(**changes: Any) -> Environment:
    """Return a machine without a GPU, with these changes."""
    values: dict[str, Any] = {
        "device": "cpu",
        "platform": "Linux",
        "python": "3.11",
        "torch": "2.13",
        **dict.fromkeys(("triton", "cuda", "gpu", "gpu_memory_mb", "compute_capability", "driver")),
        "cpu_count": 2,
    }
    return Environment(**{**values, **changes})


def make_correctness(*, passed: bool = True, digest: str = DIGEST, **changes: Any) -> Correctness:
    """Return the result of a correctness check with one figure; `changes` are not validated."""
    check = Check(
        name="relative RMS error", where="512 tokens", value=1e-3, limit=6e-3, passed=passed
    )
    good = Correctness(
        passed=passed,
        checks=(check,),
        device="cuda",
        dtype="bfloat16",
        longest=512,
        seconds=1.0,
        seed="00",
        source_digest=digest,
    )
    return good.model_copy(update=changes)


def make_sample(length: int = 512, speed: float = 1000.0, **changes: Any) -> Sample:
    """Return a sample; `changes` are not validated, so that bad data can be made."""
    good = Sample(
        length=length,
        tokens_per_sec=1000.0,
        vram_mb=10.0,
        elapsed_seconds=1.0,
        runs=10,
        first_call_seconds=2.0,
        import_seconds=3.0,
        cache="shared",
        source_file="fla/ops/quasar/chunk.py",
        layer_file="fla/layers/quasar.py",
        source_digest=DIGEST,
        correctness=make_correctness(),
        started_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
    )
    return good.model_copy(update={"tokens_per_sec": speed, **changes})


def telemetry(before: dict[str, Any], after: dict[str, Any], *during: Any) -> Telemetry:
    states = tuple(Snapshot(**state) for state in during)
    return Telemetry(before=Snapshot(**before), during=states, after=Snapshot(**after))
