"""The section of docs/results/models.md about the costs of each mechanism, and its plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.cases.mechanisms import bound_ms
from benchmarks.engine.comparison import WAYS, Way
from benchmarks.engine.mechanism import FLA, SEQUENTIAL
from benchmarks.engine.results import Entry, Run
from benchmarks.mechanisms import implementations
from benchmarks.report.documents import RESULTS
from benchmarks.report.markdown import facts, gib, microseconds, milliseconds, records, share, worst
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

PLOTS: Mapping[Way, Path] = {
    "forward": RESULTS / "mechanisms-forward.svg",
    "forward and backward": RESULTS / "mechanisms-training.svg",
}
DETAILED_TOKENS = 65_536
"""The length whose memory, share of the bound and errors are shown."""
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
OTHERS, COLOUR = "Other mechanisms", PINK
REFERENCE, REFERENCE_COLOUR = "softmax attention", GREY
"""The mechanism that is in every panel."""


def label(name: str) -> str:
    """Return the name of an implementation in tables."""
    one = implementations()[name]
    return f"{one.mechanism}, {one.by}"


def of(run: Run, way: str, *, packed: bool = False) -> dict[str, dict[int, Entry]]:
    """Return the timed calls, by implementation and tokens."""
    result: dict[str, dict[int, Entry]] = {}
    for entry in run.table("calls"):
        if not entry.failure and (entry.of["way"], entry.of["packed"]) == (way, packed):
            result.setdefault(entry.by, {})[int(entry.of["tokens"])] = entry
    return result


def per_second(entry: Entry, ms: str = "ms") -> str:
    """Return millions of tokens of all sequences in a second."""
    tokens = int(entry.of["batch"]) * int(entry.of["tokens"])
    return f"{tokens / entry.figures[ms] / 1e3:.3g}"


def speeds(run: Run, way: Way) -> str:
    """Return the table of milliseconds by tokens."""
    timed = of(run, way)
    lengths = sorted({tokens for calls in timed.values() for tokens in calls})

    def cells(name: str, calls: Mapping[int, Entry]) -> dict[str, str]:
        ms = {n: calls[n].figures["ms"] if n in calls else None for n in lengths}
        return {
            "ms by tokens": label(name),
            **{f"{n:,}": milliseconds(time) for n, time in ms.items()},
            "M tokens/s at its longest": per_second(calls[max(calls)]),
        }

    return records(cells(name, calls) for name, calls in timed.items())


def details(run: Run) -> str:
    """Return the table of one length: memory, share of the bound, packed sequences, errors."""
    lines = []
    for way in WAYS:
        packed = of(run, way, packed=True)
        for name, calls in of(run, way).items():
            tokens = min(calls, key=lambda n: abs(n - DETAILED_TOKENS))
            entry, packed_entry = calls[tokens], packed.get(name, {}).get(tokens)
            line = {
                "call": f"{label(name)}, {way}",
                "tokens": f"{tokens:,}",
                "ms": milliseconds(entry.figures["ms"]),
                "M tokens/s": per_second(entry),
                "share of the bound": share(bound_ms(run, entry) / entry.figures["ms"]),
                "GiB": gib(entry.figures["peak_bytes"]),
                "in a row, ms": milliseconds(entry.figures.get("in_a_row_ms")),
                "packed, ms": milliseconds(packed_entry.figures["ms"] if packed_entry else None),
                "error": worst(entry),
            }
            lines.append(line)
    return records(lines)


def decoding(run: Run) -> str:
    """Return the table of one token."""
    return records(
        {
            "one token": label(entry.by),
            "sequences": str(entry.of["batch"]),
            "us": microseconds(entry.figures["ms"], 1),
            "clock": entry.texts["clock"],
            "M tokens/s": per_second(entry),
            "share of the bound": share(bound_ms(run, entry) / entry.figures["ms"]),
            "error": worst(entry),
        }
        for calls in of(run, "decoding").values()
        for entry in calls.values()
    )


def training(run: Run) -> str:
    """Return the table of the small model's training."""
    return records(
        {
            "setting": str(entry.of["setting"]),
            "parameters": f"{int(entry.of['parameters']) / 1e6:.2f} M",
            "batch": f"{entry.of['batch']} x {entry.of['tokens']:,}",
            "step, ms": milliseconds(entry.figures["step_ms"]),
            "M tokens/s": per_second(entry, "step_ms"),
            "GiB": gib(entry.figures["peak_bytes"]),
            "GPU busy": share(entry.figures["busy"]),
            "computed by": ", ".join(f"{name}: {by}" for name, by in entry.texts.items()),
        }
        for entry in run.table("training")
    )


def absent(run: Run) -> str:
    """Return the table of the calls that were not measured, with the reasons."""

    def cells(entry: Entry) -> dict[str, str]:
        packed = "packed " if entry.of.get("packed") else ""
        tokens = f", {packed}{entry.of['tokens']:,} tokens" if "tokens" in entry.of else ""
        return {
            "not measured": f"{label(entry.by)}: {entry.of.get('way', 'all else')}{tokens}",
            "why": (entry.failure or "").replace("|", "\\|"),
        }

    lines = [cells(entry) for entry in run.table("calls") if entry.failure]
    return records(lines)


def tables(run: Run) -> str:
    """Return all tables with titles, after the machine and the versions."""
    where = run.where() | {
        "rates": f"copies {run.number('copy_gb_per_s') / 1e3:.2f} TB/s, "
        f"bf16 products {run.number('product_tflops'):.0f} TFLOP/s",
        "others": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "took": f"{run.number('seconds'):.0f} s of {run.number('limit_seconds'):.0f}",
        "protocol": run.protocol,
    }
    parts = {
        "Forward": speeds(run, "forward"),
        "Forward and backward": speeds(run, "forward and backward"),
        f"At {DETAILED_TOKENS:,} tokens": details(run),
        "Decoding": decoding(run),
        "Training the small model": training(run),
        "What is missing": absent(run),
    }
    titled = "\n\n".join(f"### {title}\n\n{text}" for title, text in parts.items())
    return f"{facts(where)}\n\n{titled}"


def families(shown: set[str]) -> dict[str, Mapping[str, str]]:
    """Return the panels, with another one for mechanisms outside of all families."""
    known = {REFERENCE, *(name for family in FAMILIES.values() for name in family)}
    others = dict.fromkeys(sorted(shown - known), COLOUR)
    return {**FAMILIES, **({OTHERS: others} if others else {})}


def plot(run: Run, way: Way) -> str:
    """Return the SVG of the kernels' time by tokens, with dashed lines for fla's."""
    known = implementations()
    timed = {n: calls for n, calls in of(run, way).items() if known[n].by != SEQUENTIAL}
    panels = []
    for title, colours in families({known[name].mechanism for name in timed}).items():
        shown = {REFERENCE: REFERENCE_COLOUR, **colours}
        lines = [
            Line(
                one.mechanism + (", fla" if one.by == FLA else ""),
                shown[one.mechanism],
                [(tokens, calls[tokens].figures["ms"]) for tokens in sorted(calls)],
                dashed=one.by == FLA,
            )
            for name, calls in timed.items()
            if (one := known[name]).mechanism in shown
        ]
        panels.append(Panel(title, lines))
    title = f"{way.capitalize()}, 8 heads of 64, bf16, {run.gpu}"
    return panel_plot(title, "tokens", "milliseconds", panels)


def plots(run: Run) -> dict[Path, str]:
    """Return the SVG of each plot by path."""
    return {path: plot(run, way) for way, path in PLOTS.items()}


def section(run: Run) -> str:
    """Return the plots and tables."""
    shown = [f"![{way}: time by tokens]({path.name})" for way, path in PLOTS.items()]
    return "\n\n".join([*shown, tables(run)])
