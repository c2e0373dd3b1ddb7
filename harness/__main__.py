"""`python -m harness`: check and time a tree as a validator does, and write a report.

It needs torch, triton, pydantic and the packages that the tree imports. Of the project's other
packages it imports only `quasar_kernels`.
"""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_on_ctrl_c()  # during the imports below

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.analysis import ab_compare
from harness.analysis.stats import table
from harness.measuring.plan import EachLength
from harness.measuring.runner import MeasurementError, Options, probe
from harness.measuring.sampler import Policy, Recorder, Sampler
from harness.measuring.trees import whole_tree
from harness.report import Report, build_report, write_report
from harness.sample import Correctness, Sample
from harness.source import tree_commit
from harness.terminal import Progress, counted, ends_quietly, printable
from harness.workload import LENGTHS, WORKLOAD, lengths_for, parse_lengths
from quasar_kernels.arguments import Parser, output_file, positive
from quasar_kernels.contract import check_tree


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m harness",
        description="Check QuasarAttention in a tree and time it in the validator's own loop.",
        epilog="`python -m harness compare A B` times two trees in turns; `gates` checks a model "
        "of blocks.",
    )
    parser.add_argument(
        "--tree",
        type=Path,
        help="root of a fork, which holds fla/, or an overlay such as quasar_kernels/overlay",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--lengths", type=parse_lengths, help="sequence lengths, such as 512,1024")
    group.add_argument("--target", type=positive, help="all lengths for a submission at this one")
    parser.add_argument("--runs", type=positive, default=3, help="cold processes per length (3)")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument(
        "--timeout",
        type=positive,
        default=int(WORKLOAD.timeout_seconds),
        help="seconds for one process (300, the validator's limit)",
    )
    parser.add_argument(
        "--cold-cache",
        action="store_true",
        help="empty kernel caches for the first run of each length",
    )
    parser.add_argument(
        "--ungated", action="store_true", help="time unchecked code; the report notes this"
    )
    parser.add_argument("--json", type=output_file, help="write the report to this file")
    parser.add_argument("--markdown", type=output_file, help="write the table to this file")
    parser.add_argument("--debug", action="store_true", help="print the log of a failed worker")
    return parser


@dataclass
class _Printer(Recorder):
    """Prints the progress on stderr."""

    progress: Progress
    runs: int
    debug: bool = False
    last_log: str = ""

    def planned(self, samples: Sequence[Sample], missing: Sequence[int]) -> None:
        number = sum(sample.length == missing[0] for sample in samples) + 1
        self.progress.show(f"{missing[0]:,} tokens: run {number} of {self.runs}")

    def checked(self, correctness: Correctness) -> None:
        figures = f"{counted(len(correctness.checks), 'check')} in {correctness.seconds:.1f} s"
        self.progress.print(f"{correctness.longest:>9} tokens: correct, {figures}")

    def accepted(self, sample: Sample, number: int) -> None:
        speed = f"{sample.tokens_per_sec:,.0f} tokens/s"
        self.progress.print(f"{sample.length:>9} tokens: run {number} of {self.runs}: {speed}")

    def failed(self, length: int, error: MeasurementError) -> None:
        same = error.log_tail and error.log_tail == self.last_log  # a fault of the tree
        self.last_log = error.log_tail
        text = "for the same reason" if same else error.explain(debug=self.debug)
        self.progress.print(f"{length:>9} tokens: failed{'' if same else ':'} {text}")


def _measure(
    arguments: argparse.Namespace, tree: Path, progress: Progress
) -> tuple[Report, Sampler]:
    options = Options(arguments.device, arguments.timeout)
    environment = probe(options)
    device = environment.device
    where = environment.gpu or f"the CPU, {counted(environment.cpu_count, 'core')}"
    progress.print(f"on {where}: torch {environment.torch}, triton {environment.triton}")
    if device == "cpu":
        progress.print("no GPU: short lengths only, and no figure for a GPU follows from them")
    lengths = arguments.lengths or lengths_for(arguments.target or LENGTHS[-1], device)
    policy = Policy(
        checked=not arguments.ungated,
        cold=lengths if arguments.cold_cache else (),
        left_out=frozenset({"timeout", "out_of_memory", "gate", "crash", "protocol"}),
    )
    recorder = _Printer(progress, arguments.runs, arguments.debug)
    sampler = Sampler(
        tree=tree, options=replace(options, device=device), policy=policy, recorder=recorder
    )
    sampler.run(EachLength(lengths, arguments.runs, too_long=frozenset({"out_of_memory"})))
    commit = tree_commit(arguments.tree)
    protocol = WORKLOAD.describe(device)
    return build_report(protocol, commit, sampler.samples, sampler.failures), sampler


def _gates(words: Sequence[str]) -> int:
    # imported here, because it imports torch, as no other command does
    from quasar_kernels.blocks.checks.command import main

    return main(words)


_COMMANDS = {"compare": ab_compare.main, "gates": _gates}
_REMOVED = {
    "history": "`git log -p FILE` shows how a committed report changed.",
    "profile": "`python -m benchmarks layer_profile` shows where the time of a call goes.",
    "schema": "`harness/report.py` describes each field of a report.",
}
"""Replacements of commands that existed in 0.2.0."""


@ends_quietly
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: every length was measured, and checked code obeys a validator's rules; 1: a measurement
    failed, or checked code breaks a rule; 2: the command line is wrong.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser, progress = _parser(), Progress()
    if words and not words[0].startswith("-"):
        if words[0] in _REMOVED:
            parser.error(f"{words[0]} was removed in 0.3.0. {_REMOVED[words[0]]}")
        if words[0] not in _COMMANDS:
            close = difflib.get_close_matches(words[0], _COMMANDS, 1)
            known = (
                f"did you mean {close[0]!r}?" if close else f"give one of {', '.join(_COMMANDS)}"
            )
            parser.error(f"there is no command {words[0]!r}; {known}")
        return _COMMANDS[words[0]](words[1:])
    arguments = parser.parse_args(words)
    if arguments.tree is None:
        parser.error("--tree is required: the root of a fork, or quasar_kernels/overlay")
    try:
        with whole_tree(arguments.tree) as tree:
            broken = check_tree(tree)
            for violation in broken:  # before minutes of measuring
                text = printable(str(violation))
                sys.stdout.write(f"A VALIDATOR REJECTS THIS TREE by its rules: {text}\n")
                sys.stdout.flush()
            with progress:
                report, sampler = _measure(arguments, tree, progress)
    except MeasurementError as error:
        progress.print(error.explain(debug=arguments.debug))
        return 1
    text = table(sampler.samples, sampler.failures)
    sys.stdout.write(text)
    if arguments.json:
        digest = write_report(arguments.json, report)
        progress.print(f"report: {arguments.json} (sha256 {digest[:16]})")
    if arguments.markdown:
        arguments.markdown.write_text(text)
    if not report.checked:
        sys.stdout.write("NOT CHECKED: correctness was not tested before these timings.\n")
    return 1 if sampler.failures or (broken and report.checked) else 0


if __name__ == "__main__":
    interrupts.run(main)
