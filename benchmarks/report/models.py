"""docs/results/models.md: the costs of each mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cases.mechanisms import bound_ms
from benchmarks.engine.comparison import WAYS
from benchmarks.engine.mechanism import FLA
from benchmarks.engine.results import Entry, Run
from benchmarks.mechanisms import implementations
from benchmarks.report.documents import RESULTS, page, run_of
from quasar_kernels.line_plot import (
    BLUE,
    CYAN,
    GREEN,
    GREY,
    PINK,
    PURPLE,
    RED,
    YELLOW,
    Line,
    Panel,
    panel_plot,
)

Record = Mapping[str, Any]
DETAILED_TOKENS = 65_536
"""The length for which memory, share of the bound and errors are shown."""
FAMILIES: Mapping[str, Mapping[str, str]] = {
    "Quasar and the delta rule": {"Quasar": GREEN, "delta rule": BLUE},
    "Decays: gated delta rule, KDA, GLA": {
        "gated delta rule": RED,
        "KDA": CYAN,
        "GLA": PURPLE,
    },
    "RWKV": {"RWKV-6": PURPLE, "RWKV-7": YELLOW},
    "Mamba-2, and a block of RWKV-6, Mamba-2 and Quasar": {
        "Mamba-2": BLUE,
        "hybrid block": PINK,
    },
}
"""The panels of a plot: which mechanisms are in each, and their colours there."""
REFERENCE = "softmax attention"
"""The mechanism that is in every panel, in grey."""


def label(name: str) -> str:
    one = implementations()[name]
    return f"{one.mechanism}, {one.by}"


def timed(run: Run, way: str, *, packed: bool = False) -> dict[str, dict[int, Entry]]:
    """Return the timed calls, by implementation and tokens."""
    result: dict[str, dict[int, Entry]] = {}
    for entry in run.table("calls"):
        if not entry.failure and (entry.of["way"], entry.of["packed"]) == (way, packed):
            result.setdefault(entry.by, {})[int(entry.of["tokens"])] = entry
    return result


def per_second(entry: Entry) -> str:
    """Return millions of tokens of all sequences in a second."""
    tokens = int(entry.of["batch"]) * int(entry.of["tokens"])
    return f"{tokens / entry.figures['ms'] / 1e3:.3g}"


def lines(run: Run, way: str) -> list[Record]:
    """Return a row for each implementation: its entries by tokens, and its longest one's speed."""
    return [
        {
            **{str(tokens): entry for tokens, entry in calls.items()},
            "name": label(name),
            "per_second": per_second(calls[max(calls)]),
        }
        for name, calls in timed(run, way).items()
    ]


def cost(run: Run, entry: Entry) -> Record:
    return {
        **entry.of,
        **entry.figures,
        **entry.texts,
        "name": label(entry.by),
        "entry": entry,
        "bound_ms": bound_ms(run, entry),
        "per_second": per_second(entry),
    }


def details(run: Run) -> list[Record]:
    """Return each kernel's call of about DETAILED_TOKENS tokens, in both ways."""
    rows: list[Record] = []
    for way in WAYS:
        packed = timed(run, way, packed=True)
        for name, calls in timed(run, way).items():
            tokens = min(calls, key=lambda n: abs(n - DETAILED_TOKENS))
            packed_call = packed.get(name, {}).get(tokens)
            packed_ms = packed_call.figures["ms"] if packed_call else None
            rows.append({**cost(run, calls[tokens]), "packed_ms": packed_ms})
    return rows


def decoding(run: Run) -> list[Record]:
    calls = timed(run, "decoding").values()
    return [cost(run, entry) for by_tokens in calls for entry in by_tokens.values()]


def absent(run: Run) -> dict[str, list[str]]:
    """Return the calls that were not measured, by reason."""
    lengths: dict[tuple[str, str, str], list[int]] = {}
    for entry in run.table("calls"):
        if entry.failure:
            key = (entry.failure, label(entry.by), str(entry.of.get("way", "all calls")))
            found = lengths.setdefault(key, [])
            found += [int(entry.of["tokens"])] if "tokens" in entry.of else []
    ways: dict[tuple[str, str, str], list[str]] = {}
    for (why, name, way), tokens in lengths.items():
        limits = " to ".join(f"{n:,}" for n in sorted({min(tokens), max(tokens)})) if tokens else ""
        ways.setdefault((why, name, limits), []).append(way)
    calls: dict[str, list[str]] = {}
    for (why, name, limits), found_ways in ways.items():
        each = found_ways if set(found_ways) != set(WAYS) else ["forward with and without backward"]
        call = ", ".join([name, *each])
        calls.setdefault(why, []).append(f"{call} ({limits} tokens)" if limits else call)
    return calls


def cost_plot(run: Run, way: str) -> str:
    """Return the SVG of the kernels' time by tokens, with dashed lines for fla's."""
    known = implementations()
    panels = []
    for title, colours in FAMILIES.items():
        shown = {REFERENCE: GREY, **colours}
        drawn = [
            Line(
                one.mechanism + (", fla" if one.by == FLA else ""),
                shown[one.mechanism],
                [(tokens, calls[tokens].figures["ms"]) for tokens in sorted(calls)],
                dashed=one.by == FLA,
            )
            for name, calls in timed(run, way).items()
            if (one := known[name]).mechanism in shown
        ]
        panels.append(Panel(title, drawn))
    title = f"{way.capitalize()}, 8 heads of 64, bf16, {run.gpu}"
    return panel_plot(title, "tokens", "milliseconds", panels)


def documents() -> dict[Path, str]:
    functions = (lines, details, decoding, absent)
    costs = run_of("mechanisms")
    return {
        **page("models", **{function.__name__: function for function in functions}),
        RESULTS / "mechanisms-forward.svg": cost_plot(costs, WAYS[0]),
        RESULTS / "mechanisms-training.svg": cost_plot(costs, WAYS[1]),
    }
