"""Checks a tree's rules, import and correctness, then measures its speed; derives no claim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.measuring.runner import MeasurementError, Options, check, confirm, measure
from harness.measuring.trees import whole_tree
from harness.sample import Correctness, Sample
from harness.source import compiled_without_source
from quasar_kernels.contract import check_tree, compiled_files

_KINDS = (
    ("NaN and Inf", "not finite"),
    ("repeatability", "two calls on one input"),
    ("cosine", ": cosine"),
    ("largest difference", "largest difference"),
    ("other checks", ""),
)
"""Kinds of checks, each with a part of their names."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: whether it passed, and a sentence or a figure.

    A finding about speed has its `sample`; `log` is a failed worker's output.
    """

    name: str
    passed: bool
    text: str
    sample: Sample | None = None
    log: str = ""


def judge_tree(
    tree: Path, lengths: Sequence[int], *, device: str = "auto", timeout: float = 300.0
) -> Iterator[Finding]:
    """Yield the findings in a validator's order, up to the first stage that fails.

    Args:
        tree: root of a fork's checkout, or an overlay, which is copied over the installed fla.
        lengths: in tokens; the correctness check at the longest one covers all.
    """
    rules = list(_rules(tree))
    yield from rules
    if not all(finding.passed for finding in rules):
        return
    try:
        with whole_tree(tree) as whole:
            yield from _run(whole, lengths, Options(device, timeout))
    except MeasurementError as error:
        yield Finding(error.kind, False, error.advice, log=error.log_tail)


def _run(tree: Path, lengths: Sequence[int], options: Options) -> Iterator[Finding]:
    correctness = check(tree, max(lengths), options)
    yield Finding("import", True, f"{correctness.device}, {correctness.dtype}")
    yield from _correctness(correctness)
    if not correctness.passed:
        return
    for length in sorted(lengths, reverse=True):
        try:
            sample = confirm(measure(tree, length, options), correctness)
        except MeasurementError as error:
            text = f"{error.kind}: {error.advice}"
            yield Finding(f"{length} tokens", False, text, log=error.log_tail)
            return
        text = f"{sample.tokens_per_sec:,.0f} tokens/s, {sample.vram_mb:,.0f} MiB"
        yield Finding(f"{length} tokens", True, text, sample)


def _rules(tree: Path) -> Iterator[Finding]:
    broken = check_tree(tree)
    imports = [v for v in broken if "import" in v.rule.lower() or "forbidden" in v.rule]
    files = [v for v in broken if v not in imports]
    for name, violations in (("files", files), ("imports", imports)):
        text = "; ".join(map(str, violations[:3])) or "as required"
        yield Finding(name, not violations, text)
    # Python writes byte code next to an overlay that it imports; this is never published.
    is_fork = (tree / "fla/__init__.py").exists()
    compiled = compiled_files(tree / "fla") if is_fork else compiled_without_source(tree)
    text = f"fla/{compiled[0]} is compiled; publish its source" if compiled else "none"
    yield Finding("compiled files", not compiled, text)


def _correctness(correctness: Correctness) -> Iterator[Finding]:
    """Yield a finding for each kind; each check counts under the first kind that matches."""
    rest = list(correctness.checks)
    for name, part in _KINDS:
        checks = [c for c in rest if part in c.name or (part == "not finite" and c.value is None)]
        rest = [c for c in rest if c not in checks]
        worst = sorted(checks, key=lambda c: (c.passed, not c.at_least, -(c.value or 0)))
        failed = [c for c in worst if not c.passed]
        text = "; ".join(map(str, failed[:2] or worst[:1])) or "none"
        yield Finding(name, not failed, text)
