"""docs/results/claim.md: the claim under simulated noise, and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.cases import claim_acceptance, claim_simulation
from benchmarks.engine.limits import missed, summary
from benchmarks.engine.results import DATA, ROOT, Run, load
from benchmarks.report.documents import page, shown
from benchmarks.report.markdown import facts, milliseconds, table

SIMULATION, ACCEPTANCE = ROOT / "benchmarks" / "honesty.json", DATA / "acceptance.json"


def simulation(run: Run) -> str:
    """Return the table of every shape of noise, below whether the promises are kept."""
    header = ("noise between processes", "refuted", "claim / median", "in 5% below", "runs")
    rows = []
    for entry in run.table("shapes"):
        name, of = entry.of["shape"], entry.figures
        rows.append(
            (
                f"{name} (healthy)" if entry.of["healthy"] else str(name),
                f"{of['refuted']:.1e}" if of["refuted"] else "0",
                f"{of['ratio']:.3f}",
                f"{of['ratio_low']:.3f}",
                f"{of['runs']:.1f}",
            )
        )
    trials = f"{run.settings['trials']:,} claims of each shape"
    where = f"{trials}, {run.created}, commit {run.commit}."
    return f"{summary(claim_simulation.limits(run))}\n\n{table(header, rows)}\n\n{where}"


def acceptance(run: Run) -> str:
    """Return the harness's test conditions, its promises, and the tables of the results."""
    ran = run.table("validator")[0].series["tokens_per_sec"]
    claim = f"{run.number('claim') / 1e6:.1f} M tokens/s by {run.settings['claim_runs']} runs"
    where = run.where() | {
        f"claim at {run.settings['target']:,} tokens": claim,
        "validator's loop": f"{len(ran)} runs, {min(ran) / 1e6:.1f} to {max(ran) / 1e6:.1f}, "
        f"median {median(ran) / 1e6:.1f}",
        "measured from nothing, confirmed": f"{run.number('cycle_seconds'):.0f} s, "
        f"{run.number('confirm_seconds'):.0f} s",
    }
    header = ("tokens", "harness, M/s", "validator's loop, M/s", "host's share", "cold call, ms")
    rows = [
        (
            f"{one.of['tokens']:,}",
            f"{one.figures['harness'] / 1e6:.2f}",
            f"{one.figures['validator'] / 1e6:.2f}",
            f"{one.figures['host_share']:.2f}",
            milliseconds(one.figures.get("cold_call_ms")),
        )
        for one in run.table("agreement")
    ]
    limits = summary(claim_acceptance.limits(run))
    return f"{limits}\n\n{facts(where)}\n\n{table(header, rows)}"


def documents() -> Mapping[Path, str]:
    """Return the text of docs/results/claim.md, by its path."""
    sections = {
        "simulation": simulation(load(SIMULATION)),
        "acceptance": shown(ACCEPTANCE, acceptance),
    }
    return page("claim", sections)


def misses() -> list[str]:
    """Return a line for each promise that the committed simulation breaks."""
    return missed(claim_simulation.limits(load(SIMULATION)))
