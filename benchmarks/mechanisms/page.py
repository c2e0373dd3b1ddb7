"""docs/results/models.md: costs of each mechanism, of WKV6, and what small models learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.learning import page as learning
from benchmarks.mechanisms.names import ENTRIES, HOST, SEQUENTIAL
from benchmarks.mechanisms.results import (
    MechanismsResults,
    Missing,
    Row,
    Trained,
    Way,
    bound_ms,
)
from benchmarks.report.documents import RESULTS, page
from benchmarks.report.markdown import facts, milliseconds, records
from benchmarks.results import DATA, load, told
from benchmarks.wkv6.page import section as wkv6
from quasar_kernels.line_plot import Line, Panel, panel_plot

RUN = DATA / "mechanisms.json"
PLOTS: Mapping[Way, Path] = {
    "forward": RESULTS / "mechanisms-forward.svg",
    "forward and backward": RESULTS / "mechanisms-training.svg",
}
DETAILED_TOKENS = 65_536
"""The length whose memory, share of the bound and errors are shown."""
FAMILIES: Mapping[str, Mapping[str, str]] = {
    "Quasar and the delta rule": {"Quasar": "#0b6e4f", "delta rule": "#2a5ca8"},
    "Decays: gated delta rule, KDA, GLA": {
        "gated delta rule": "#b5432a",
        "KDA": "#00838f",
        "GLA": "#8a5fb0",
    },
    "RWKV": {"RWKV-6": "#8a5fb0", "RWKV-7": "#a87400"},
    "Mamba-2, and a block of RWKV-6, Mamba-2 and Quasar": {
        "Mamba-2": "#2a5ca8",
        "hybrid block": "#c2185b",
    },
}
"""The panels of a plot: which mechanisms are in each, and their colours there."""
REFERENCE, REFERENCE_COLOUR = "softmax attention", "#777777"
"""The mechanism that is in every panel."""


def label(name: str) -> str:
    """Return what a table calls an implementation."""
    entry = ENTRIES[name]
    return f"{entry.mechanism}, {entry.by}"


def of(rows: Sequence[Row], way: Way, *, packed: bool = False) -> dict[str, dict[int, Row]]:
    """Return rows by implementation and tokens."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.way == way and row.packed == packed:
            found.setdefault(row.name, {})[row.tokens] = row
    return found


def speeds(results: MechanismsResults, way: Way) -> str:
    """Return the table of milliseconds by tokens."""
    found = of(results.rows, way)
    lengths = sorted({tokens for rows in found.values() for tokens in rows})
    if not lengths:
        return "Nothing was measured."

    def cells(name: str, rows: Mapping[int, Row]) -> dict[str, str]:
        times = {n: milliseconds(rows[n].ms if n in rows else None) for n in lengths}
        longest = max(rows)
        return {
            "ms by tokens": label(name),
            **{f"{n:,}": time for n, time in times.items()},
            "M tokens/s at its longest": f"{rows[longest].tokens_per_second / 1e6:.3g}",
        }

    return records(cells(name, rows) for name, rows in found.items())


def details(results: MechanismsResults) -> str:
    """Return the table of one length: memory, share of the bound, packed sequences, errors."""
    lines = []
    ways: tuple[Way, ...] = ("forward", "forward and backward")
    for way in ways:
        packed = of(results.rows, way, packed=True)
        for name, rows in of(results.rows, way).items():
            tokens = min(rows, key=lambda n: abs(n - DETAILED_TOKENS))
            row, beside = rows[tokens], packed.get(name, {}).get(tokens)
            lines.append(
                {
                    "call": f"{label(name)}, {way}",
                    "tokens": f"{tokens:,}",
                    "ms": milliseconds(row.ms),
                    "M tokens/s": f"{row.tokens_per_second / 1e6:.3g}",
                    "share of the bound": f"{bound_ms(row, results.rates) / row.ms:.0%}",
                    "GiB": f"{row.peak_bytes / 2**30:.2f}",
                    "in a row, ms": milliseconds(row.in_a_row_ms),
                    "packed, ms": milliseconds(beside.ms if beside else None),
                    "error": worst(row),
                }
            )
    return records(lines) if lines else "Nothing was measured."


def worst(row: Row) -> str:
    """Return the largest error and its tensor."""
    tensor, error = max(row.errors.items(), key=lambda item: item[1])
    return f"{error:.1e} ({tensor})"


def decoding(results: MechanismsResults) -> str:
    """Return the table of one token."""

    def cells(row: Row) -> dict[str, str]:
        return {
            "one token": label(row.name),
            "sequences": str(row.batch),
            "us": f"{row.ms * 1e3:.1f}",
            "clock": row.clock,
            "M tokens/s": f"{row.tokens_per_second / 1e6:.3g}",
            "share of the bound": f"{bound_ms(row, results.rates) / row.ms:.0%}",
            "error": worst(row),
        }

    rows = [row for row in results.rows if row.way == "decoding"]
    return records(map(cells, rows)) if rows else "Nothing was measured."


def training(results: MechanismsResults) -> str:
    """Return the table of the small model's training."""

    def cells(row: Trained) -> dict[str, str]:
        return {
            "setting": row.setting,
            "parameters": f"{row.parameters / 1e6:.2f} M",
            "batch": f"{row.batch} x {row.tokens:,}",
            "step, ms": milliseconds(row.step_ms),
            "M tokens/s": f"{row.tokens_per_second / 1e6:.3g}",
            "GiB": f"{row.peak_bytes / 2**30:.2f}",
            "GPU busy": f"{row.busy:.0%}",
            "computed by": ", ".join(f"{name}: {by}" for name, by in row.backends.items()),
        }

    return records(map(cells, results.trained)) if results.trained else "Nothing was measured."


def absent(results: MechanismsResults) -> str:
    """Return the table of what is not there, and why."""

    def cells(one: Missing) -> dict[str, str]:
        packed = "packed " if one.packed else ""
        tokens = "" if one.tokens is None else f", {packed}{one.tokens:,} tokens"
        reason = one.reason.replace("|", "\\|")
        return {
            "not measured": f"{label(one.name)}: {one.way or 'all else'}{tokens}",
            "why": reason,
        }

    lines = [cells(one) for one in results.missing]
    return records(lines) if lines else "Everything was measured."


def tables(results: MechanismsResults) -> str:
    """Return all tables, each below its title, and where it was measured."""
    rates, where = results.rates, results.where()
    where |= {
        "rates": f"copies {rates.copy_gb_per_s / 1e3:.2f} TB/s, "
        f"bf16 products {rates.product_tflops:.0f} TFLOP/s",
        "others": ", ".join(f"{name} {version}" for name, version in results.versions.items()),
        "variants": f"at most {results.variants} of a kernel" if results.variants else "all",
        "took": f"{results.seconds:.0f} s of {results.limit_seconds:.0f}",
        "protocol": results.protocol,
    }
    parts = {
        "Forward": speeds(results, "forward"),
        "Forward and backward": speeds(results, "forward and backward"),
        f"At {DETAILED_TOKENS:,} tokens": details(results),
        "Decoding": decoding(results),
        "Training the small model": training(results),
        "What is missing": absent(results),
    }
    titled = "\n\n".join(f"### {title}\n\n{text}" for title, text in parts.items())
    return f"{facts(where)}\n\n{titled}"


def plot(results: MechanismsResults, way: Way) -> str:
    """Return the SVG of the time by tokens of kernels; what is not this project's is dashed."""
    panels = []
    for title, colours in FAMILIES.items():
        shown = {REFERENCE: REFERENCE_COLOUR, **colours}
        lines = [
            Line(
                entry.mechanism + (", fla" if entry.by == HOST else ""),
                shown[entry.mechanism],
                [(tokens, rows[tokens].ms) for tokens in sorted(rows)],
                dashed=entry.by == HOST,
            )
            for name, rows in of(results.rows, way).items()
            if (entry := ENTRIES[name]).mechanism in shown and entry.by != SEQUENTIAL
        ]
        panels.append(Panel(title, lines))
    title = f"{way.capitalize()}, 8 heads of 64, bf16, {results.environment.gpu}"
    return panel_plot(title, "tokens", "milliseconds", panels)


def plotted(results: MechanismsResults) -> list[Way]:
    """Return the plots that have lines."""
    return [way for way in PLOTS if of(results.rows, way)]


def _with_plots(results: MechanismsResults) -> str:
    shown = [f"![{way}: time by tokens]({PLOTS[way].name})" for way in plotted(results)]
    return "\n\n".join([*shown, tables(results)])


def documents() -> dict[Path, str]:
    """Return docs/results/models.md and its plots by path; no plots before the first run."""
    costs = told(MechanismsResults, RUN, _with_plots)
    sections = {"wkv6": wkv6(), "mechanisms": costs, **learning.sections()}
    found = {**page("models", sections), **learning.plots()}
    if RUN.exists():
        results = load(MechanismsResults, RUN)
        found |= {PLOTS[way]: plot(results, way) for way in plotted(results)}
    return found
