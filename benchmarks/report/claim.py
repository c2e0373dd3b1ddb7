"""docs/results/claim.md: the claim under simulated noise, and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.cases import claim_acceptance, claim_simulation
from benchmarks.engine.limits import summary
from benchmarks.engine.results import DATA, ROOT, Run, load
from benchmarks.report.documents import page
from benchmarks.report.markdown import facts, milliseconds, records

SIMULATION, ACCEPTANCE = ROOT / "benchmarks" / "honesty.json", DATA / "acceptance.json"


def simulation(run: Run) -> str:
    """Return whether the limits are kept, and the table of all shapes of noise."""
    rows = records(
        {
            "noise between processes": f"{one.of['shape']}{' (healthy)' * bool(one.of['healthy'])}",
            "refuted": f"{of['refuted']:.1e}" if of["refuted"] else "0",
            "claim / median": f"{of['ratio']:.3f}",
            "in 5% below": f"{of['ratio_low']:.3f}",
            "runs": f"{of['runs']:.1f}",
        }
        for one in run.table("shapes")
        for of in [one.figures]
    )
    trials = f"{run.settings['trials']:,} claims of each shape"
    where = f"{trials}, {run.created}, commit {run.commit}."
    return f"{summary(claim_simulation.limits(run))}\n\n{rows}\n\n{where}"


def acceptance(run: Run) -> str:
    """Return the test conditions, the limits, and the tables of the results."""
    ran = run.table("validator")[0].series["tokens_per_sec"]
    claim = f"{run.number('claim') / 1e6:.1f} M tokens/s by {run.settings['claim_runs']} runs"
    where = run.where() | {
        f"claim at {run.settings['target']:,} tokens": claim,
        "validator's loop": f"{len(ran)} runs, {min(ran) / 1e6:.1f} to {max(ran) / 1e6:.1f}, "
        f"median {median(ran) / 1e6:.1f}",
        "measured from nothing, confirmed": f"{run.number('cycle_seconds'):.0f} s, "
        f"{run.number('confirm_seconds'):.0f} s",
    }
    rows = records(
        {
            "tokens": f"{one.of['tokens']:,}",
            "harness, M/s": f"{one.figures['harness'] / 1e6:.2f}",
            "validator's loop, M/s": f"{one.figures['validator'] / 1e6:.2f}",
            "host's share": f"{one.figures['host_share']:.2f}",
            "cold call, ms": milliseconds(one.figures.get("cold_call_ms")),
        }
        for one in run.table("agreement")
    )
    return f"{summary(claim_acceptance.limits(run))}\n\n{facts(where)}\n\n{rows}"


def documents() -> Mapping[Path, str]:
    """Return the text of docs/results/claim.md, by its path."""
    sections = {
        "simulation": simulation(load(SIMULATION)),
        "acceptance": acceptance(load(ACCEPTANCE)),
    }
    return page("claim", sections)
