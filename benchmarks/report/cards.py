"""docs/results/cards.md, estimates.md: cards that were not measured, and contributed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_args

from benchmarks.engine.results import DATA, ROOT, Entry, Run, load
from benchmarks.report.documents import page
from benchmarks.report.estimates import SPEEDS, Estimates, Implementation, speeds
from benchmarks.report.layer_steps import profile_table
from harness.hardware.gpus import (
    GPUS,
    OTHERS_GIB,
    SPARE,
    Gpu,
    best_target,
    known,
    longest,
    measuring_bytes,
)
from quasar_kernels.memory import LayerSize, Way, is_fused, peak_bytes

CARDS = ROOT / "benchmarks" / "cards"
"""Contributed runs of the case `layer`."""
OTHER = ROOT / "benchmarks" / "h100" / "overlay-portable.json"
"""Speeds of the portable path on another GPU than that of its kernels."""
SHOWN = (512, 2048, 16_384, 100_000, 262_144, 1_000_000)
LONG = 100_000
"""Tokens from which kernels determine the time of a call, and its tensors the memory."""
PEAKS = (
    ("Hopper", DATA / "layer-memory.json", "9.0"),
    ("portable", ROOT / "benchmarks" / "h100" / "layer-memory-portable.json", "8.0"),
)
"""Paths, their measured peaks, and a compute capability that uses them."""
SMALL = {
    "MIG slice 1g.5gb": 4.75,
    "8 GB": 8.0,
    "MIG slice 1g.10gb": 9.75,
    "12 GB": 12.0,
    "16 GB": 16.0,
    "20 GB": 20.0,
    "24 GB": 24.0,
}
"""GiB that the driver reports of small cards."""


def speed_rows(estimates: Estimates) -> list[dict[str, Any]]:
    """Return the estimated speeds by card, path and length."""
    return [
        {"card": gpu.label, "path": path.name, **{str(n): path.speed(n, gpu) for n in SHOWN}}
        for gpu in GPUS
        for path in ((estimates.hopper,) if gpu.hopper else (estimates.portable, estimates.fused))
    ]


class Compared(NamedTuple):
    """A measured speed that the method can be compared with."""

    path: Implementation
    gpu: Gpu
    tokens: int
    measured: float  # tokens/s


def compared(estimates: Estimates) -> list[Compared]:
    """Return the measured speeds of each path on its GPU, and of the portable one on another."""
    hopper, portable, fused = estimates
    other = load(OTHER)
    other_gpu = known(other.gpu) or portable.gpu

    def whole(path: Implementation) -> Compared:
        tokens, call_ms = path.kernels.number("tokens"), path.kernels.number("call_ms")
        return Compared(path, path.gpu, int(tokens), tokens / call_ms * 1e3)

    return [
        *(Compared(hopper, hopper.gpu, n, speed) for n, speed in speeds(load(SPEEDS)).items()),
        whole(portable),
        *(Compared(portable, other_gpu, n, speed) for n, speed in speeds(other).items()),
        whole(fused),
    ]


def compared_row(one: Compared) -> dict[str, Any]:
    estimate = one.path.speed(one.tokens, one.gpu)
    return {
        "path": one.path.name,
        "gpu": one.gpu.label,
        "tokens": one.tokens,
        "estimated": estimate,
        "measured": one.measured,
        "difference": estimate / one.measured - 1,
    }


def lengths(memory_gib: float, capability: str) -> dict[str, Any]:
    target = best_target(memory_gib, capability)
    return {
        "best_target": f"{target:,}" if target else "none",
        "takes": measuring_bytes(target, capability) if target else None,
        "forward": longest(memory_gib, capability),
        "training": longest(memory_gib, capability, "training"),
    }


def counted_bytes(peak: Entry, capability: str) -> int:
    D, H, S, tokens = (
        int(peak.of[name]) for name in ("hidden_size", "num_heads", "head_dim", "tokens")
    )
    size = LayerSize(D, H, S)
    way: Way = next(one for one in get_args(Way) if one == peak.of["way"])
    return peak_bytes(tokens, way, size, fused=is_fused(capability, size))


def long_peaks(run: Run) -> list[Entry]:
    """Return the measured peaks of calls so long that their tensors determine the memory."""
    peaks = run.table("peaks")
    return [one for one in peaks if not one.failure and int(one.of["tokens"]) >= LONG]


def peak_row(peak: Entry, path: str, capability: str) -> dict[str, Any]:
    counted = counted_bytes(peak, capability)
    difference = counted / peak.figures["peak_bytes"] - 1
    row = {"path": path, "counted_bytes": counted, "difference": difference}
    return {**peak.of, **peak.figures, **row}


def contributed() -> list[Run]:
    """Return the contributed runs.

    Raises:
        SystemExit: a file is not a checked run of this project's layer on a GPU.
    """
    runs = []
    for path in sorted(CARDS.glob("*.json")):
        run = load(path)
        checked = [entry for entry in run.entries if "checked_tokens" in entry.figures]
        complete = run.environment and run.environment.gpu and run.environment.driver and run.commit
        if (
            run.case != "layer"
            or run.settings.get("tree") != "overlay"
            or not (checked and complete)
        ):
            raise SystemExit(
                f"{path} must be written by `python -m benchmarks layer` on a machine with a GPU, "
                "from a checkout or with --commit"
            )
        runs.append(run)
    return runs


def measured_run(run: Run, estimates: Estimates) -> dict[str, Any]:
    found, card = speeds(run), known(run.gpu)
    last = max(found)
    of_estimate = found[last] / estimates.speed(last, card) if card else None
    by_length = {str(tokens): speed for tokens, speed in found.items()}
    return {**run.where(), **by_length, "of_estimate": of_estimate}


def documents() -> dict[Path, str]:
    context = _context()
    return page("cards", **context) | page("estimates", **context)


def _context() -> dict[str, Any]:
    estimates = Estimates.load()
    b200 = next(gpu for gpu in GPUS if gpu.capability == "10.0")
    runs = [load(SPEEDS), *contributed()]
    return dict(  # noqa: C408 # names without quotes
        compared=[compared_row(one) for one in compared(estimates)],
        estimates=estimates,
        gib_of_others=OTHERS_GIB,
        gpus=[
            {**vars(gpu), "label": gpu.label, **lengths(gpu.memory_gib, gpu.capability)}
            for gpu in GPUS
        ],
        other=load(OTHER),
        peaks=[
            peak_row(peak, path, capability)
            for path, file, capability in PEAKS
            for peak in long_peaks(load(file))
        ],
        profiles=[profile_table(path.kernels) for path in estimates[1:]],
        runs=[measured_run(run, estimates) for run in runs],
        small=[
            {"memory": name, "path": path, **lengths(size, capability)}
            for name, size in SMALL.items()
            for path, _, capability in PEAKS
        ],
        spare=SPARE,
        speeds=speed_rows(estimates),
        # Hopper's fused kernels at the card's own rates
        tcgen05=[
            {
                "tokens": n,
                "portable": estimates.speed(n, b200),
                "fused": estimates.hopper.speed(n, b200),
            }
            for n in SHOWN[2:]
        ],
    )
