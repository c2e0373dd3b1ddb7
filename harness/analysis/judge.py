"""Judges a tree without a claim: its rules, its import, its correctness, then its speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.measuring.runner import MeasurementError, check, measure
from harness.measuring.trees import whole_tree
from harness.report import Check, GateResult, Measurement
from harness.source import unreadable_files
from quasar_kernels.contract import Violation, check_tree, compiled_files


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: whether it passed, and a sentence or a figure.

    `measurement` is what a finding about speed rests on, `log` a failed worker's output.
    """

    name: str
    passed: bool
    told: str
    measurement: Measurement | None = None
    log: str = ""


def judge_tree(
    tree: Path, lengths: Sequence[int], *, device: str = "auto", timeout: float = 300.0
) -> Iterator[Finding]:
    """Yield what is found, in the order of a validator; a stage that fails is the last.

    Args:
        tree: root of a fork's checkout, or an overlay, which is laid over the host library.
        lengths: in tokens; the longest one's gate stands for all.
        timeout: seconds for each process.
    """
    rules = list(_rules(tree))
    yield from rules
    if not all(finding.passed for finding in rules):
        return
    try:
        with whole_tree(tree) as whole:
            yield from _run(whole, lengths, device, timeout)
    except MeasurementError as error:
        yield Finding(error.kind, False, error.advice, log=error.log_tail)


def _run(tree: Path, lengths: Sequence[int], device: str, timeout: float) -> Iterator[Finding]:
    gate = check(tree, max(lengths), device=device, timeout=timeout)
    yield Finding("import", True, f"{gate.device}, {gate.dtype}")
    yield from _correctness(gate)
    if not gate.passed:
        return
    for length in sorted(lengths, reverse=True):
        try:
            found = measure(tree, length, device=device, gate=gate, timeout=timeout)
        except MeasurementError as error:
            told = f"{error.kind}: {error.advice}"
            yield Finding(f"{length} tokens", False, told, log=error.log_tail)
            return
        told = f"{found.tokens_per_sec:,.0f} tokens/s, {found.vram_mb:,.0f} MiB"
        yield Finding(f"{length} tokens", True, told, found)


def _rules(tree: Path) -> Iterator[Finding]:
    broken = check_tree(tree)
    imports = [v for v in broken if "import" in v.rule.lower() or "forbidden" in v.rule]
    files = [v for v in broken if v not in imports]
    for name, violations in (("files", files), ("imports", imports)):
        yield _rule(name, violations)
    # Python writes byte code beside an overlay that it imports; a publication leaves that out.
    is_fork = (tree / "fla/__init__.py").exists()
    compiled = compiled_files(tree / "fla") if is_fork else unreadable_files(tree)
    told = f"fla/{compiled[0]} is compiled; publish its source" if compiled else "none"
    yield Finding("compiled files", not compiled, told)


def _rule(name: str, violations: Sequence[Violation]) -> Finding:
    return Finding(name, not violations, "; ".join(map(str, violations[:3])) or "as asked")


def _correctness(gate: GateResult) -> Iterator[Finding]:
    not_finite = [c for c in gate.checks if c.value is None or "not finite" in c.name]
    yield _checks("NaN and Inf", not_finite, "none")
    for name, part in (
        ("repeatability", "two calls on one input"),
        ("cosine", ": cosine"),
        ("largest difference", "largest difference"),
    ):
        yield _checks(name, [c for c in gate.checks if part in c.name and c not in not_finite], "-")
    shown = ("two calls on one input", ": cosine", "largest difference", "not finite")
    rest = [c for c in gate.checks if not any(part in c.name for part in shown)]
    yield _checks("other checks", [c for c in rest if not c.passed], f"{len(rest)} passed")


def _checks(name: str, checks: Iterable[Check], otherwise: str) -> Finding:
    worst = sorted(checks, key=lambda c: (c.passed, not c.at_least, -(c.value or 0)))
    failed = [c for c in worst if not c.passed]
    told = "; ".join(map(str, failed[:2] or worst[:1])) or otherwise
    return Finding(name, not failed, told)
