"""The operator's documents: the figures of docs/kernels.md, and its plot.

Nsight Compute's and compute-sanitizer's sections stand in docs/kernels.md as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine.limits import Criterion, missed, summary
from benchmarks.gpu_tests.results import GpuTests, failures, gpu_tests_table
from benchmarks.nsight.results import Profile
from benchmarks.nsight.tables import profile_tables
from benchmarks.operator.results import (
    COPY_SHARE,
    ERRORS,
    FIRST_CALL_SECONDS,
    FORWARD_MS,
    MEMORY_TIMES_OUTPUT,
    Decoding,
    OperatorResults,
    Timing,
    operator_criteria,
)
from benchmarks.operator.training_results import (
    GRADIENT_ERROR,
    TRAINING_LEAD,
    TRAINING_MS,
    TrainingResults,
    training_criteria,
)
from benchmarks.report.documents import RESULTS, page
from benchmarks.report.markdown import facts, milliseconds, records, table
from benchmarks.results import DATA, load
from benchmarks.sanitizer.results import SanitizerResults, sanitizer_table
from benchmarks.sanitizer.results import misses as sanitizer_misses
from quasar_kernels.line_plot import Line, line_plot

PLOT = RESULTS / "operator.svg"
LABELS = {"triton": "Triton", "cuda": "CUDA", "peer": "peer"}
COLOURS = {"triton": "#0b6e4f", "cuda": "#2a5ca8", "peer": "#b5432a"}


def machine(results: OperatorResults) -> str:
    """Return the table of where and when."""
    e = results.environment
    software = f"CUDA {e.cuda}, Python {e.python}"
    where = results.where(software, f"copies {results.copy_gb_per_s / 1000:.2f} TB/s")
    return facts({**where, "peer": results.peer or "not measured", "protocol": results.protocol})


def _speeds(what: str, rows: Sequence[tuple[str, Mapping[str, Timing], str]], limit: str) -> str:
    """Return a table of times; each row is what was timed, its times, and its limit."""
    names = list(rows[0][1])
    leads = [name for name in names if name != "peer" and "peer" in names]
    rested = [name for name in names if rows[0][1][name].rested_ms is not None]
    header = [what, *(f"{LABELS[n]}, ms" for n in names)]
    header += [f"peer / {LABELS[n]}" for n in leads]
    header += [f"{LABELS[n]} from rest, ms" for n in rested]
    header += [*(f"{LABELS[n]} eager, ms" for n in names), limit]
    lines = []
    for label, times, most in rows:
        line = [label, *(milliseconds(times[n].graph_ms) for n in names)]
        line += [f"{times['peer'].graph_ms / times[n].graph_ms:.1f}" for n in leads]
        line += [milliseconds(times[n].rested_ms) for n in rested]
        lines.append([*line, *(milliseconds(times[n].eager_ms) for n in names), most])
    return table(header, lines)


def forward(results: OperatorResults) -> str:
    """Return the table of the forward pass."""

    def limit(tokens: int) -> str:
        limits = [(name, ms[tokens]) for name, ms in FORWARD_MS.items() if tokens in ms]
        return ", ".join(f"{LABELS[name]} {ms:g}" for name, ms in limits)

    rows = [(f"{row.tokens:,}", row.times, limit(row.tokens)) for row in results.forward]
    return _speeds("tokens", rows, "limit")


def forgetting(results: OperatorResults) -> str:
    """Return the table of what stopping early gains."""
    header = (
        "tokens", "slow heads", "from rest, ms", "in full", "without a pause, ms", "in full",
        "error",
    )  # fmt: skip
    rows = []
    for row in results.forgetting:
        times = (row.rested_ms, row.full_rested_ms, row.graph_ms, row.full_graph_ms)
        cells = [*map(milliseconds, times), f"{row.error:.1e}"]
        rows.append((f"{row.tokens:,}", f"{row.slow_heads} of 8", *cells))
    return table(header, rows)


def training(results: TrainingResults) -> str:
    """Return the table of forward and backward, and where it was measured."""
    rows = []
    for row in results.training:
        limit = f"{TRAINING_MS[row.shape]:g} ms, " if row.shape in TRAINING_MS else ""
        limit += f"{TRAINING_LEAD['cuda']:g} times the peer"
        rows.append((" x ".join(f"{n:,}" for n in row.shape), row.times, limit))
    where = results.where()
    where |= {"peer": results.peer or "not measured", "protocol": results.protocol}
    speeds = _speeds("sequences x tokens x heads x width", rows, "CUDA's limit")
    return f"{facts(where)}\n\n{speeds}"


def accuracy(results: OperatorResults) -> str:
    """Return the table of the output's errors."""
    names = list(results.accuracy[0].errors)
    ours = [name for name in names if name != "peer"]
    header = ["tokens, keys", *(f"{LABELS[n]}" for n in names)]
    header += [*(f"{LABELS[n]}, worst eighth" for n in ours), "limit"]
    rows = []
    for row in results.accuracy:
        cells = [f"{row.errors[n].overall:.1e}" if n in row.errors else "" for n in names]
        cells += [f"{row.errors[n].worst_eighth:.1e}" for n in ours]
        rows.append([f"{row.tokens:,}, {row.keys}", *cells, f"{ERRORS[row.keys]:g}"])
    return table(header, rows)


def gradients(results: TrainingResults) -> str:
    """Return the table of the gradients' errors."""
    found = results.gradients
    tensors = list(found.errors["triton"])
    header = [f"{found.tokens:,} tokens", *(f"d{tensor}" for tensor in tensors), "limit"]
    rows = []
    for name, errors in found.errors.items():
        limit = "" if name == "peer" else f"{GRADIENT_ERROR:g}"
        rows.append([LABELS[name], *(f"{errors[tensor]:.1e}" for tensor in tensors), limit])
    return table(header, rows)


def costs(results: OperatorResults) -> str:
    """Return the table of memory and the first call."""
    memory = results.memory
    limits = (f"{MEMORY_TIMES_OUTPUT:g}", f"{FIRST_CALL_SECONDS:g}")
    header = (
        "", f"peak bytes at {memory.tokens:,} tokens", "times the output", "limit",
        "first call, s", "limit", "import before it, s",
    )  # fmt: skip
    rows = []
    for who, peak in memory.peak_bytes.items():
        first, (most, longest) = results.first_call[who], ("", "") if who == "peer" else limits
        times = f"{peak / memory.output_bytes:.3f}"
        seconds = (f"{first.call_seconds:.1f}", longest, f"{first.import_seconds:.1f}")
        rows.append((LABELS[who], f"{peak:,}", times, most, *seconds))
    return table(header, rows)


def decoding(results: OperatorResults) -> str:
    """Return the table of one token's times."""

    def cells(row: Decoding) -> dict[str, str]:
        ours, theirs = row.times["triton"], row.times.get("peer")
        return {
            "sequences": str(row.batch),
            "state, MB": f"{row.state_bytes / 1e6:.2f}",
            "Triton, us": f"{ours.graph_ms * 1e3:.2f}",
            "copy, us": f"{row.copy_ms * 1e3:.2f}",
            "share of the copy": f"{row.copy_ms / ours.graph_ms:.0%}",
            "TB/s": f"{2 * row.state_bytes / ours.graph_ms / 1e9:.2f}",
            "peer, us": f"{theirs.graph_ms * 1e3:.1f}" if theirs else "-",
            "Triton eager, us": f"{ours.eager_ms * 1e3:.1f}",
            "peer eager, us": f"{theirs.eager_ms * 1e3:.1f}" if theirs else "-",
        }

    text = f"The share at the largest batch must be {COPY_SHARE:.0%} or more."
    return f"{records(map(cells, results.decoding))}\n\n{text}"


class Runs(NamedTuple):
    """What the document is made of."""

    operator: OperatorResults
    training: TrainingResults
    profile: Profile
    sanitizer: SanitizerResults
    gpu_tests: GpuTests


def load_runs() -> Runs:
    """Read the runs.

    Raises:
        OSError, pydantic.ValidationError: a file is missing, or is no run of its kind.
    """
    return Runs(
        load(OperatorResults, DATA / "operator.json"),
        load(TrainingResults, DATA / "operator_training.json"),
        load(Profile, DATA / "profile.json"),
        load(SanitizerResults, DATA / "sanitizer.json"),
        load(GpuTests, DATA / "gpu-tests.json"),
    )


SECTIONS: Mapping[str, Callable[[Runs], str]] = {
    "machine": lambda runs: machine(runs.operator),
    "forward": lambda runs: forward(runs.operator),
    "forgetting": lambda runs: forgetting(runs.operator),
    "training": lambda runs: training(runs.training),
    "decoding": lambda runs: decoding(runs.operator),
    "costs": lambda runs: costs(runs.operator),
    "profile": lambda runs: profile_tables(runs.profile),
    "accuracy": lambda runs: accuracy(runs.operator),
    "gradients": lambda runs: gradients(runs.training),
    "limits": lambda runs: summary(limits(runs)),
    "gpu_tests": lambda runs: gpu_tests_table(runs.gpu_tests),
    "sanitizer": lambda runs: sanitizer_table(runs.sanitizer),
}
"""What makes each section's figures, in the document's order."""


def plot(results: OperatorResults) -> str:
    """Return the SVG of the forward pass's times against T."""
    lines = []
    for name, colour in COLOURS.items():
        rows = [row for row in results.forward if name in row.times]
        for kind, dashed in (("graph", False), ("eager", True)):
            points = [(row.tokens, getattr(row.times[name], f"{kind}_ms")) for row in rows]
            if points:
                lines.append(Line(f"{LABELS[name]}, {kind}", colour, points, dashed))
    title = f"Forward pass, B=1, H=8, S=64, bf16, {results.environment.gpu}"
    return line_plot(title, "tokens", "milliseconds", lines)


def documents(runs: Runs) -> dict[Path, str]:
    """Return the documents that the runs make, as they must be."""
    sections = {name: made(runs) for name, made in SECTIONS.items()}
    return {**page("kernels", sections), PLOT: plot(runs.operator)}


def limits(runs: Runs) -> list[Criterion]:
    """Return every limit of the operator with its figure."""
    return [*operator_criteria(runs.operator), *training_criteria(runs.training)]


def outside(runs: Runs) -> list[str]:
    """Name every figure outside of its limit, and what the tests and the sanitizer found."""
    failed = [f"failed: {one}" for one in failures(runs.gpu_tests)]
    return [*missed(limits(runs)), *failed, *sanitizer_misses(runs.sanitizer)]
