"""The figures of docs/results/claim.md, from what simulate.py and acceptance.py found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.engine.limits import Criterion, summary
from benchmarks.honesty.results import Acceptance, ClaimSimulation, load
from benchmarks.report.documents import page
from benchmarks.report.markdown import facts, milliseconds, table
from benchmarks.results import DATA as GPU_DATA
from benchmarks.results import ROOT, told
from harness.claim.derive import ACCEPTED_SHARE

DATA = ROOT / "benchmarks" / "honesty.json"
ACCEPTANCE = GPU_DATA / "acceptance.json"

REFUTED_MOST = 1e-4
"""Largest chance, under every shape of noise, that a validator's one run misses the claim."""

RATIO_LEAST = 0.97
"""Least claim beside the median on a healthy GPU."""


def limits(run: ClaimSimulation | None = None) -> list[Criterion]:
    """Return every promise with its figure, of the committed simulation unless one is given."""
    run = run or load(DATA)
    found = [
        Criterion(f"{one.shape}: refuted", one.refuted, REFUTED_MOST, digits=".1e")
        for one in run.shapes
    ]
    healthy = [one for one in run.shapes if one.healthy]
    return found + [
        Criterion(f"{one.shape}: claim / median", one.ratio, RATIO_LEAST, at_least=True)
        for one in healthy
    ]


def simulation(run: ClaimSimulation) -> str:
    """Return the table of every shape of noise, below whether the promises are kept."""
    header = ("noise between processes", "refuted", "claim / median", "in 5% below", "runs")
    rows = [
        (
            one.shape + (" (healthy)" if one.healthy else ""),
            f"{one.refuted:.1e}" if one.refuted else "0",
            f"{one.ratio:.3f}",
            f"{one.ratio_low:.3f}",
            f"{one.runs:.1f}",
        )
        for one in run.shapes
    ]
    where = f"{run.trials:,} claims of each shape, {run.created}, commit {run.commit}."
    return f"{summary(limits(run))}\n\n{table(header, rows)}\n\n{where}"


def acceptance_limits(found: Acceptance) -> list[Criterion]:
    """Return what must hold on a GPU, with its figure."""
    confirmed = sum(speed >= ACCEPTED_SHARE * found.claim for speed in found.validator)
    apart = [
        Criterion(
            f"{one.tokens:,} tokens, harness and validator's loop apart, %",
            abs(one.harness / one.validator - 1),
            0.01,
            scale=100,
            digits=".2f",
        )
        for one in found.agreements
    ]
    return [
        Criterion("validator's runs that refute the claim", len(found.validator) - confirmed, 0),
        Criterion("claim / median", found.claim / median(found.validator), 0.97, at_least=True),
        Criterion("measuring from nothing, s", found.cycle_seconds, 240),
        Criterion("confirming what was measured, s", found.confirm_seconds, 60),
        *apart,
    ]


def acceptance(run: Acceptance) -> str:
    """Return where the harness was judged, its promises, and the tables of what was found."""
    ran, where = run.validator, run.where()
    claimed = f"{run.claim / 1e6:.1f} M tokens/s by {run.claim_runs} runs"
    took = f"{run.cycle_seconds:.0f} s, {run.confirm_seconds:.0f} s"
    where |= {
        f"claim at {run.target:,} tokens": claimed,
        "validator's loop": f"{len(ran)} runs, {min(ran) / 1e6:.1f} to {max(ran) / 1e6:.1f}, "
        f"median {median(ran) / 1e6:.1f}",
        "measured from nothing, confirmed": took,
    }
    header = ("tokens", "harness, M/s", "validator's loop, M/s", "host's share", "cold call, ms")
    rows = [
        (
            f"{one.tokens:,}",
            f"{one.harness / 1e6:.2f}",
            f"{one.validator / 1e6:.2f}",
            f"{one.host_share:.2f}",
            milliseconds(one.cold_call_ms),
        )
        for one in run.agreements
    ]
    return f"{summary(acceptance_limits(run))}\n\n{facts(where)}\n\n{table(header, rows)}"


def documents() -> Mapping[Path, str]:
    """Return the text of docs/results/claim.md, by its path."""
    sections = {
        "simulation": simulation(load(DATA)),
        "acceptance": told(Acceptance, ACCEPTANCE, acceptance),
    }
    return page("claim", sections)
