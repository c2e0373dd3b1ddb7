"""`python -m harness compare A B`: two trees timed in turns, and how sure their difference is."""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.claim.tolerance import student_quantile
from harness.measuring.runner import Measure, MeasurementError, check, measure
from harness.measuring.together import Check
from harness.report import GateResult
from harness.workload import WORKLOAD
from quasar_kernels.line_plot import Line, line_plot


@dataclass(frozen=True)
class Difference:
    """How fast B is beside A: the ratio of their speeds, and its 95% interval.

    `a` and `b` are the medians of their speeds, in the unit of the pairs.
    """

    ratio: float
    low: float
    high: float
    a: float
    b: float

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval leaves out that they are equally fast."""
        return not self.low <= 1 <= self.high

    def __str__(self) -> str:
        found = f"{self.ratio - 1:+.2%} (95% interval {self.low - 1:+.2%} to {self.high - 1:+.2%})"
        if not self.beyond_noise:
            return f"no difference beyond the noise: {found}"
        return f"B is {'faster' if self.ratio > 1 else 'slower'}: {found}"


def difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Return B's speed over A's from pairs (A, B) that were taken one right after the other.

    The geometric mean of the ratios, with the interval of Student's distribution over their
    logarithms: what disturbs both of a pair alike cancels out.

    Raises:
        ValueError: fewer than two pairs, or a speed that is not a positive finite number.
    """
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} pairs say nothing about noise; take at least 2")
    if not all(math.isfinite(speed) and speed > 0 for pair in pairs for speed in pair):
        raise ValueError("a speed is not a positive finite number")
    logs = [math.log(b / a) for a, b in pairs]
    middle = statistics.fmean(logs)
    quantile = student_quantile(0.975, len(logs) - 1)
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    a, b = (statistics.median(speeds) for speeds in zip(*pairs, strict=True))
    return Difference(math.exp(middle), math.exp(middle - half), math.exp(middle + half), a, b)


Found = Sequence[tuple[int, Difference]]
"""What a duel found, by length in tokens."""


def table(found: Found, names: tuple[str, str] = ("A", "B")) -> str:
    """Return a table in markdown, a row for each length."""
    head = f"| tokens | {names[0]}, tokens/s | {names[1]}, tokens/s | ratio | 95% interval |"
    rows = [
        f"| {length:,} | {one.a:,.0f} | {one.b:,.0f} | {one.ratio:.3f} | "
        f"{one.low:.3f} to {one.high:.3f} |"
        for length, one in found
    ]
    return "\n".join([head, "| ---: | ---: | ---: | ---: | ---: |", *rows]) + "\n"


def plot(found: Found, names: tuple[str, str] = ("A", "B")) -> str:
    """Return a chart of both speeds over the lengths, as SVG that a telephone can show."""
    speeds = [(length, one.a, one.b) for length, one in sorted(found, key=lambda f: f[0])]
    lines = [
        Line(names[0], "#999999", [(length, a) for length, a, _ in speeds], dashed=True),
        Line(names[1], "#0b6e4f", [(length, b) for length, _, b in speeds]),
    ]
    return line_plot(f"{names[0]} and {names[1]}", "tokens", "tokens/s", lines)


@dataclass(frozen=True)
class Duel:
    """What two trees are timed with.

    Attributes:
        pairs: processes of each tree at each length.
        gated: False times unchecked code.
        timer, checker: `runner.measure` and `runner.check`, or their stand-ins.
        stop: ends the processes promptly when set.
    """

    device: str = "auto"
    pairs: int = 5
    timeout: float = WORKLOAD.timeout_seconds
    gated: bool = True
    timer: Measure = measure
    checker: Check = check
    stop: threading.Event | None = None

    def run(self, a: Path, b: Path, lengths: Sequence[int]) -> Iterator[tuple[int, Difference]]:
        """Yield a length and what was found there; A and B take turns, and turns in being first.

        Both may be one tree: what is found then is noise.

        Raises:
            MeasurementError: a tree is wrong or cannot be timed.
        """
        gates = {tree: self._gate(tree, max(lengths)) for tree in (a, b)}
        for length in lengths:
            pairs = []
            for number in range(self.pairs):
                turn = 1 if number % 2 == 0 else -1
                speeds = [self._speed(tree, length, gates[tree]) for tree in (a, b)[::turn]]
                of_a, of_b = speeds[::turn]
                pairs.append((of_a, of_b))
            yield length, difference(pairs)

    def _gate(self, tree: Path, length: int) -> GateResult | bool:
        if not self.gated:
            return False
        gate = self.checker(
            *(tree, length), device=self.device, timeout=self.timeout, stop=self.stop
        )
        if not gate.passed:
            failed = "; ".join(str(one) for one in gate.failed[:3])
            raise MeasurementError(f"wrong results: {failed}", "gate", gate=gate)
        return gate

    def _speed(self, tree: Path, length: int, gate: GateResult | bool) -> float:
        return self.timer(
            *(tree, length),
            device=self.device,
            gate=gate,
            timeout=self.timeout,
            stop=self.stop,
            cold_cache=False,
        ).tokens_per_sec


@contextmanager
def checked_out(name: str, repository: Path) -> Iterator[Path]:
    """Give the root of a tree: the folder `name`, or what the repository holds at that commit.

    Raises:
        MeasurementError: it is neither.
    """
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tree-") as folder:
        packed = Path(folder, "tree.tar")
        command = ["git", "-C", str(repository), "archive", f"--output={packed}", "--", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            why = f"{name} is neither a folder nor a commit of {repository}: {done.stderr.strip()}"
            raise MeasurementError(why, "protocol", remedy="Name the clone by --repo.")
        with tarfile.open(packed) as archive:
            archive.extractall(Path(folder, "tree"), filter="data")
        yield Path(folder, "tree").resolve()


def main(argv: Sequence[str]) -> int:
    """Compare two trees and print a line a length; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness compare", description="Time two trees in turns, A and B."
    )
    parser.add_argument("a", help="folder of a fork, or a commit")
    parser.add_argument("b", help="another one")
    parser.add_argument("--repo", type=Path, default=Path(), help="the clone that has the commits")
    parser.add_argument("--lengths", default="2048", help="sequence lengths, such as 512,1024")
    parser.add_argument("--pairs", type=int, default=5, help="processes of each, at least 2 (5)")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--timeout", type=float, default=WORKLOAD.timeout_seconds)
    parser.add_argument("--svg", type=Path, help="draw both speeds into this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--ungated", action="store_true", help="time unchecked code")
    given = parser.parse_args(argv)
    try:
        lengths = [int(part) for part in given.lengths.split(",")]
    except ValueError:
        parser.error(f"--lengths {given.lengths!r} is not a list of lengths such as 512,1024")
    if given.pairs < 2 or min(lengths) < 1:
        parser.error("--pairs must be at least 2, and --lengths at least 1")
    duel = Duel(given.device, given.pairs, given.timeout, gated=not given.ungated)
    try:
        with checked_out(given.a, given.repo) as a, checked_out(given.b, given.repo) as b:
            found = []
            for length, one in duel.run(a, b, lengths):
                found.append((length, one))
                sys.stdout.write(f"{length:>9} tokens: {one}\n")
                sys.stdout.flush()
    except MeasurementError as error:
        sys.stderr.write(f"{error.kind}: {error.advice}\n")
        return 1
    if given.svg:
        given.svg.write_text(plot(found))
    if given.markdown:
        given.markdown.write_text(table(found))
    return 0
