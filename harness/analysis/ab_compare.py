"""`python -m harness compare A B`: is B faster than A, beyond what A differs from itself?

Times are taken in blocks of three fresh processes: A, B, and A a second time as the control. The
order within each block is drawn at random. If A and B are equally fast, each of the three is then
equally likely to be a block's fastest, whatever the host does meanwhile: swings, drifts and slow
processes meet A and B alike, as they do not know the order. The test uses these ranks alone, so it
assumes no distribution of the noise (a randomisation test in complete blocks, R. A. Fisher, The
Design of Experiments, 1935).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from harness.measuring.runner import Measure, MeasurementError, check, measure
from harness.measuring.together import Check
from harness.measuring.trees import whole_tree
from harness.report import GateResult
from harness.terminal import Progress
from harness.workload import WORKLOAD
from quasar_kernels.line_plot import Line, line_plot

ERROR_RATE = 0.01
"""Of comparisons of equally fast trees, at most this share reports a difference, before the control
rules out most of these as well."""

LEAST_BLOCKS = 5
"""With fewer blocks no order of speeds is unlikely enough: B first in all of four has 2 / 3**4."""

BLOCKS = 7
"""Default: the smallest number at which one disturbed block does not prevent a verdict."""


class Block(NamedTuple):
    """Speeds of three processes that ran one right after the other, in tokens/s."""

    a: float
    b: float
    control: float
    """A's second process."""


def take_block(
    time_a: Callable[[], float], time_b: Callable[[], float], order: random.Random
) -> Block:
    """Time A, B and A again, in an order that `order` draws; the functions return speeds."""
    timers = {"a": time_a, "b": time_b, "control": time_a}
    return Block(**{name: timers[name]() for name in order.sample(sorted(timers), len(timers))})


@dataclass(frozen=True)
class Difference:
    """How fast B is compared with A.

    Attributes:
        ratio: the median of B's speed over A's.
        low, high: the interval of that ratio, at a confidence of at least 99%.
        control: the median of A's second speed over its first: what the same code differs by.
        a, b: the medians of the speeds, in the unit of the blocks.
    """

    ratio: float
    low: float
    high: float
    control: float
    a: float
    b: float

    @property
    def faster(self) -> bool:
        """Whether B is faster than A: all of the interval is above what the control reaches."""
        return self.low > max(self.control, 1 / self.control)

    @property
    def slower(self) -> bool:
        """Whether B is slower than A, in the same sense."""
        return self.high < min(self.control, 1 / self.control)

    def __str__(self) -> str:
        verdict = "no difference beyond the noise"
        if self.faster or self.slower:
            verdict = f"B is {'faster' if self.faster else 'slower'}"
        return (
            f"{verdict}: {self.ratio - 1:+.2%} (99% interval {self.low - 1:+.2%} to "
            f"{self.high - 1:+.2%}; A against itself {self.control - 1:+.2%})"
        )


def difference(blocks: Sequence[Block]) -> Difference:
    """Return B's speed over A's.

    Each block gives two ratios, of B to A and of B to the control. Under a true ratio r the number
    of them above r is, in each block, 0, 1 or 2 with equal probability. The interval holds the r
    for which the sum over all blocks is not among the unlikeliest ERROR_RATE.

    Raises:
        ValueError: fewer than LEAST_BLOCKS blocks, or a speed that is not a positive finite number.
    """
    if len(blocks) < LEAST_BLOCKS:
        raise ValueError(f"{len(blocks)} blocks allow no verdict; take at least {LEAST_BLOCKS}")
    if not all(math.isfinite(speed) and speed > 0 for block in blocks for speed in block):
        raise ValueError("a speed is not a positive finite number")
    ratios = sorted([x.b / x.a for x in blocks] + [x.b / x.control for x in blocks])
    outside = _ratios_outside(len(blocks))
    return Difference(
        ratio=math.sqrt(ratios[len(blocks) - 1] * ratios[len(blocks)]),
        low=ratios[outside],
        high=ratios[-1 - outside],
        control=math.exp(statistics.median(math.log(x.control / x.a) for x in blocks)),
        a=statistics.median(speed for x in blocks for speed in (x.a, x.control)),
        b=statistics.median(x.b for x in blocks),
    )


def _ratios_outside(blocks: int) -> int:
    """Return how many of the smallest ratios lie below the interval, and as many above it.

    It is the largest k for which at most k ratios lie on one given side with probability
    ERROR_RATE / 2.
    """
    ways = [1]  # in which the blocks' counts of 0, 1 or 2 add up to each sum
    for _ in range(blocks):
        ways = [sum(ways[max(0, total - 2) : total + 1]) for total in range(len(ways) + 2)]
    limit = ERROR_RATE / 2 * 3**blocks
    return sum(1 for unlikely in accumulate(ways) if unlikely <= limit) - 1


Found = Sequence[tuple[int, Difference]]
"""The result of a comparison, by length in tokens."""


def table(found: Found, names: tuple[str, str] = ("A", "B")) -> str:
    """Return a table in markdown, a row for each length."""
    head = (
        f"| tokens | {names[0]}, tokens/s | {names[1]}, tokens/s | ratio | 99% interval | "
        f"{names[0]} against itself |"
    )
    rows = [
        f"| {length:,} | {one.a:,.0f} | {one.b:,.0f} | {one.ratio:.3f} | "
        f"{one.low:.3f} to {one.high:.3f} | {one.control:.3f} |"
        for length, one in found
    ]
    return "\n".join([head, "| ---: | ---: | ---: | ---: | ---: | ---: |", *rows]) + "\n"


def plot(found: Found, names: tuple[str, str] = ("A", "B")) -> str:
    """Return a chart of both speeds over the lengths, as SVG that a telephone can show."""
    speeds = [(length, one.a, one.b) for length, one in sorted(found, key=lambda f: f[0])]
    lines = [
        Line(names[0], "#999999", [(length, a) for length, a, _ in speeds], dashed=True),
        Line(names[1], "#0b6e4f", [(length, b) for length, _, b in speeds]),
    ]
    return line_plot(f"{names[0]} and {names[1]}", "tokens", "tokens/s", lines)


def overload(own: int = 0) -> str:
    """Return a warning when the host has more work than cores; "" when it has not.

    Args:
        own: threads of this comparison, which are part of the load once it runs.
    """
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    if load - own <= cores:
        return ""
    return (
        f"warning: the load is {load:.1f} on {cores} usable cores; other work makes these speeds "
        "vary, so only large differences can be found. Stop it, or raise --blocks."
    )


def _ignore(_length: int, _number: int, _block: Block) -> None:
    pass


@dataclass(frozen=True)
class Comparison:
    """The settings with which two trees are compared.

    Attributes:
        blocks: of three processes each, at each length.
        gated: False times unchecked code.
        timer, checker: `runner.measure` and `runner.check`, or test doubles.
        stop: ends the processes promptly when set.
        order: draws the order of each block; independent of the host's noise.
        on_block: called with the length, the block's number from 1, and the block.
    """

    device: str = "auto"
    blocks: int = BLOCKS
    timeout: float = WORKLOAD.timeout_seconds
    gated: bool = True
    timer: Measure = measure
    checker: Check = check
    stop: threading.Event | None = None
    order: random.Random = field(default_factory=random.SystemRandom, compare=False)
    on_block: Callable[[int, int, Block], object] = field(default=_ignore, compare=False)

    def run(self, a: Path, b: Path, lengths: Sequence[int]) -> Iterator[tuple[int, Difference]]:
        """Yield each length with the difference of the two trees, which may be one.

        Raises:
            MeasurementError: a tree is wrong or cannot be timed.
        """
        gates = {tree: self._gate(tree, max(lengths)) for tree in (a, b)}
        for length in lengths:

            def time_a(length: int = length) -> float:
                return self._speed(a, length, gates[a])

            def time_b(length: int = length) -> float:
                return self._speed(b, length, gates[b])

            blocks = []
            for number in range(1, self.blocks + 1):
                blocks.append(take_block(time_a, time_b, self.order))
                self.on_block(length, number, blocks[-1])
            yield length, difference(blocks)

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


class BlockPrinter:
    """Prints each block as it is taken, and a warning once when the host is overloaded."""

    def __init__(self, progress: Progress, blocks: int) -> None:
        self._progress, self._blocks, self._warned = progress, blocks, False
        self._warn(own=0)

    def _warn(self, own: int) -> None:
        if not self._warned and (warning := overload(own)):
            self._progress.say(warning)
            self._warned = True

    def __call__(self, length: int, number: int, block: Block) -> None:
        self._progress.say(
            f"{length:>9} tokens, block {number} of {self._blocks}: A {block.a:,.0f}, "
            f"B {block.b:,.0f}, A again {block.control:,.0f} tokens/s"
        )
        self._warn(own=len(os.sched_getaffinity(0)))  # a worker on a CPU uses all of them


@contextmanager
def checked_out(name: str, repository: Path) -> Iterator[Path]:
    """Yield the root of a tree: the folder `name`, or the repository's content at that commit.

    An overlay is laid over the installed host library. `COMMIT:FOLDER` names a folder of a commit.

    Raises:
        MeasurementError: it is neither a folder nor a commit, or it holds no kernels.
    """
    if Path(name).is_dir():
        with whole_tree(Path(name)) as tree:
            yield tree
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
        with whole_tree(Path(folder, "tree"), name) as tree:
            yield tree


def main(argv: Sequence[str]) -> int:
    """Compare two trees and print a line for each length; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness compare",
        description="Time two trees, A and B, in blocks of A, B and A again in random order. "
        "A difference is reported only where it exceeds what A differs from itself.",
    )
    parser.add_argument("a", help="folder of a fork or an overlay, or a commit")
    parser.add_argument("b", help="another one")
    parser.add_argument("--repo", type=Path, default=Path(), help="the clone that has the commits")
    parser.add_argument("--lengths", default="2048", help="sequence lengths, such as 512,1024")
    parser.add_argument("--blocks", "--pairs", type=int, default=BLOCKS,
                        help="of three processes each; a verdict needs "
                        f"{LEAST_BLOCKS} ({BLOCKS})")  # fmt: skip
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--timeout", type=float, default=WORKLOAD.timeout_seconds)
    parser.add_argument("--svg", type=Path, help="draw both speeds into this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--ungated", action="store_true", help="time unchecked code")
    parser.add_argument("--debug", action="store_true", help="print a failed worker's log")
    given = parser.parse_args(argv)
    try:
        lengths = [int(part) for part in given.lengths.split(",")]
    except ValueError:
        parser.error(f"--lengths {given.lengths!r} is not a list of lengths such as 512,1024")
    if given.blocks < LEAST_BLOCKS or min(lengths) < 1:
        parser.error(f"--blocks must be at least {LEAST_BLOCKS}, and --lengths at least 1")
    progress = Progress()
    comparison = Comparison(
        *(given.device, given.blocks, given.timeout),
        gated=not given.ungated,
        on_block=BlockPrinter(progress, given.blocks),
    )
    try:
        with checked_out(given.a, given.repo) as a, checked_out(given.b, given.repo) as b:
            found = []
            for length, one in comparison.run(a, b, lengths):
                found.append((length, one))
                sys.stdout.write(f"{length:>9} tokens: {one}\n")
                sys.stdout.flush()
    except MeasurementError as error:
        progress.say(error.explain(debug=given.debug))
        return 1
    if given.svg:
        given.svg.write_text(plot(found))
    if given.markdown:
        given.markdown.write_text(table(found))
    return 0
