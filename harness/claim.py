"""The claim of a submission: a pure function of accepted measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.report import Measurement
from harness.stats import accepted, rejection


class NoClaim(Exception):
    """Nothing may be claimed from these measurements; the message names why."""


@dataclass(frozen=True)
class Claim:
    """What a submission says about its speed.

    `benchmarks` maps each measured length, as text, to `tokens_per_sec` and `vram_mb` (MiB).
    Every speed in it is the slowest accepted run less `headroom`; memory is the largest seen.
    `tokens_per_sec` and `vram_mb` repeat the figures of `target_sequence_length`.
    """

    target_sequence_length: int
    tokens_per_sec: float
    vram_mb: float
    benchmarks: dict[str, dict[str, float]]
    headroom: float


def _refuse_bad_data(runs: Mapping[int, Sequence[Measurement]]) -> None:
    for length, measurements in runs.items():
        for m in measurements:
            if m.length != length:
                raise NoClaim(f"a run of {m.length} tokens was filed under {length}")
            for name, value in (
                ("tokens_per_sec", m.tokens_per_sec),
                ("elapsed_seconds", m.elapsed_seconds),
            ):
                if not (math.isfinite(value) and value > 0):
                    raise NoClaim(f"{name} at {length} tokens is {value}, not a positive number")
            if not (math.isfinite(m.vram_mb) and m.vram_mb >= 0):
                raise NoClaim(f"vram_mb at {length} tokens is {m.vram_mb}")
    everything = [m for measurements in runs.values() for m in measurements]
    if len({m.source_digest for m in everything}) > 1:
        raise NoClaim("the runs measured different versions of the code")
    if len({m.environment for m in everything if m.environment is not None}) > 1:
        raise NoClaim("the runs come from different machines or software")


def derive_claim(
    runs: Mapping[int, Sequence[Measurement]], target: int, headroom: float = 0.03
) -> Claim:
    """Return the claim for `target` tokens from cold runs filed by length.

    A run counts when its gate is green on the same code and its GPU was undisturbed
    (`stats.rejection`). A worse accepted run can only lower the claim, and a length without an
    accepted run is never claimed.

    Raises:
        NoClaim: no accepted run at the target, or a run that cannot be trusted (not a positive
            finite number, filed under another length, another version of the code).
        ValueError: `headroom` is not in [0, 1).
    """
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom {headroom} must be at least 0 and below 1")
    _refuse_bad_data(runs)
    benchmarks: dict[str, dict[str, float]] = {}
    for length in sorted(runs):
        counted = accepted(runs[length])
        if counted:
            benchmarks[str(length)] = {
                "tokens_per_sec": min(m.tokens_per_sec for m in counted) * (1 - headroom),
                "vram_mb": max(m.vram_mb for m in counted),
            }
    if str(target) not in benchmarks:
        reasons = sorted({reason for m in runs.get(target, ()) if (reason := rejection(m))})
        why = "; ".join(reasons) or "it was not measured"
        raise NoClaim(f"no accepted run at the target of {target} tokens: {why}")
    figures = benchmarks[str(target)]
    return Claim(target, figures["tokens_per_sec"], figures["vram_mb"], benchmarks, headroom)
