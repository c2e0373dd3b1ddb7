"""`python -m harness compare A B`: is B faster than A, beyond the noise of A itself?

`difference.py` has the statistics.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.analysis.difference import MIN_BLOCKS, Block, Difference, difference, take_block
from harness.measuring.process import scratch_folder
from harness.measuring.runner import (
    DEFAULT,
    CheckTree,
    Measure,
    MeasurementError,
    Options,
    check,
    confirm,
    measure,
    require_passed,
)
from harness.measuring.trees import whole_tree
from harness.sample import Correctness
from harness.terminal import Progress
from harness.workload import WORKLOAD, parse_lengths
from quasar_kernels.arguments import Parser, output_file
from quasar_kernels.line_plot import GREEN, GREY, Line, line_plot

BLOCKS = 7
"""Default: the smallest number at which one disturbed block does not prevent a verdict."""


Differences = Sequence[tuple[int, Difference]]
"""The result of a comparison, by length in tokens."""


def table(differences: Differences, names: tuple[str, str] = ("A", "B")) -> str:
    """Return a table in markdown, a row for each length."""
    head = (
        f"| tokens | {names[0]}, tokens/s | {names[1]}, tokens/s | ratio | 99% interval | "
        f"{names[0]} against itself |"
    )
    rows = [
        f"| {length:,} | {one.a:,.0f} | {one.b:,.0f} | {one.ratio:.3f} | "
        f"{one.low:.3f} to {one.high:.3f} | {one.control:.3f} |"
        for length, one in differences
    ]
    return "\n".join([head, "| ---: | ---: | ---: | ---: | ---: | ---: |", *rows]) + "\n"


def plot(differences: Differences, names: tuple[str, str] = ("A", "B")) -> str:
    """Return an SVG chart of both speeds over the lengths."""
    speeds = [(length, one.a, one.b) for length, one in sorted(differences, key=lambda f: f[0])]
    lines = [
        Line(names[0], GREY, [(length, a) for length, a, _ in speeds], dashed=True),
        Line(names[1], GREEN, [(length, b) for length, _, b in speeds]),
    ]
    return line_plot(f"{names[0]} and {names[1]}", "tokens", "tokens/s", lines)


OnBlock = Callable[[int, int, Block], object]
"""Called with the length, the block's number from 1, and the block."""


@dataclass(frozen=True)
class Comparison:
    """The settings with which two trees are compared."""

    options: Options = DEFAULT
    blocks: int = BLOCKS  # number of blocks at each length; a block times three processes
    checked: bool = True
    measure: Measure = measure
    check: CheckTree = check
    # draws the order within each block
    order: random.Random = field(default_factory=random.SystemRandom, compare=False)
    on_block: OnBlock = field(default=lambda *_: None, compare=False)

    def run(self, a: Path, b: Path, lengths: Sequence[int]) -> Iterator[tuple[int, Difference]]:
        """Yield each length with the trees' difference; both may be the same folder.

        Raises a MeasurementError if a tree fails its correctness check or cannot be timed.
        """
        results = {tree: self._correctness(tree, max(lengths)) for tree in (a, b)}
        for length in lengths:

            def time_a(length: int = length) -> float:
                return self._speed(a, length, results[a])

            def time_b(length: int = length) -> float:
                return self._speed(b, length, results[b])

            blocks = []
            for number in range(1, self.blocks + 1):
                blocks.append(take_block(time_a, time_b, self.order))
                self.on_block(length, number, blocks[-1])
            yield length, difference(blocks)

    def _correctness(self, tree: Path, length: int) -> Correctness | None:
        return require_passed(self.check(tree, length, self.options)) if self.checked else None

    def _speed(self, tree: Path, length: int, correctness: Correctness | None) -> float:
        sample = self.measure(tree, length, self.options, cross_check=self.checked)
        if correctness is not None:
            sample = confirm(sample, correctness)
        return sample.tokens_per_sec


def block_printer(progress: Progress, blocks: int) -> OnBlock:
    """Return a function that prints each block; warn now if the host is overloaded."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if load > cores:
        progress.print(
            f"warning: the load is {load:.1f} on {cores} usable cores; other work makes these "
            "speeds vary, so only large differences can be found. Stop it, or raise --blocks."
        )
    return lambda length, number, block: progress.print(
        f"{length:>9} tokens, block {number} of {blocks}: A {block.a:,.0f}, "
        f"B {block.b:,.0f}, A again {block.control:,.0f} tokens/s"
    )


@contextmanager
def checked_out(name: str, repository: Path) -> Iterator[Path]:
    """Yield the root of a tree: a folder, or a commit (or COMMIT:FOLDER) of the repository.

    Raises a MeasurementError if it is neither, or does not contain kernels.
    """
    if Path(name).is_dir():
        with whole_tree(Path(name)) as tree:
            yield tree
        return
    with scratch_folder("tree-") as folder:
        packed = folder / "tree.tar"
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
    parser = Parser(
        prog="python -m harness compare",
        description="Time two trees, A and B, in blocks of A, B and A again in random order. "
        "A difference is reported only if it exceeds that between A and A again.",
    )
    parser.add_argument("a", help="folder of a fork or an overlay, or a commit")
    parser.add_argument("b", help="another one")
    parser.add_argument("--repo", type=Path, default=Path(), help="the clone that has the commits")
    parser.add_argument(
        "--lengths", type=parse_lengths, default="2048", help="sequence lengths, such as 512,1024"
    )
    parser.add_argument(
        "--blocks",
        "--pairs",
        type=int,
        default=BLOCKS,
        help=f"of three processes each; a verdict needs {MIN_BLOCKS} ({BLOCKS})",
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--timeout", type=float, default=WORKLOAD.timeout_seconds)
    parser.add_argument("--svg", type=output_file, help="draw both speeds into this file")
    parser.add_argument("--markdown", type=output_file, help="write the table to this file")
    parser.add_argument("--ungated", action="store_true", help="time unchecked code")
    parser.add_argument("--debug", action="store_true", help="print a failed worker's log")
    arguments = parser.parse_args(argv)
    if arguments.blocks < MIN_BLOCKS:
        parser.error(f"--blocks must be at least {MIN_BLOCKS}")
    progress = Progress()
    comparison = Comparison(
        Options(arguments.device, arguments.timeout),
        arguments.blocks,
        checked=not arguments.ungated,
        on_block=block_printer(progress, arguments.blocks),
    )
    try:
        with (
            checked_out(arguments.a, arguments.repo) as a,
            checked_out(arguments.b, arguments.repo) as b,
        ):
            results = []
            for length, one in comparison.run(a, b, arguments.lengths):
                results.append((length, one))
                sys.stdout.write(f"{length:>9} tokens: {one}\n")
                sys.stdout.flush()
    except MeasurementError as error:
        progress.print(error.explain(debug=arguments.debug))
        return 1
    if arguments.svg:
        arguments.svg.write_text(plot(results))
    if arguments.markdown:
        arguments.markdown.write_text(table(results))
    return 0
