"""`python -m harness`: check and time a tree as a validator does, and write a report.

Needs torch, triton, pydantic and what the tree itself imports; no other part of the project.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.report import Report, build_report, report_schema, write_report
from harness.runner import MeasurementError, probe
from harness.source import tree_commit
from harness.stats import rejection, spread
from harness.sweep import Sweep, sweep
from harness.workload import LENGTHS, VALIDATOR_LENGTHS, WORKLOAD, lengths_for


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths such as 512,1024")
    return lengths


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness",
        description="Check QuasarAttention in a tree and time it in the validator's own loop.",
        epilog="`python -m harness schema` prints the JSON schema of a report.",
    )
    parser.add_argument("command", nargs="?", choices=["schema"], help=argparse.SUPPRESS)
    parser.add_argument("--tree", type=Path, help="root of a fork: the folder that holds fla/")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--lengths", type=_lengths, help="sequence lengths, such as 512,1024")
    group.add_argument("--target", type=_positive, help="all lengths for a submission at this one")
    parser.add_argument("--runs", type=_positive, default=3, help="cold processes per length (3)")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--timeout", type=_positive, default=int(WORKLOAD.timeout_seconds),
                        help="seconds for one process (300, the validator's limit)")  # fmt: skip
    parser.add_argument("--cold-cache", action="store_true",
                        help="empty kernel caches for the first run of each length")  # fmt: skip
    parser.add_argument("--ungated", action="store_true",
                        help="time unchecked code, and say so in the report")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser


def _table(found: Sweep) -> str:
    head = (
        f"{'tokens':>9} {'slowest tokens/s':>17} {'spread':>7} {'MiB':>9} {'first call':>11}  note"
    )
    rows = [head]
    for length in sorted(found.runs):
        runs = found.runs[length]
        speeds = [m.tokens_per_sec for m in runs]
        notes = sorted({reason for m in runs if (reason := rejection(m))})
        rows.append(
            f"{length:>9} {min(speeds):>17,.0f} {spread(speeds):>7.1%} "
            f"{max(m.vram_mb for m in runs):>9,.0f} "
            f"{max(m.first_call_seconds for m in runs):>9.2f} s  " + ("; ".join(notes) or "checked")
        )
    rows += [f"{f.length:>9} {f.kind}: {f.reason}" for f in found.failures]
    return "\n".join(rows)


def _measure(arguments: argparse.Namespace) -> tuple[Report, Sweep]:
    environment = probe(device=arguments.device)
    device = environment.device
    where = environment.gpu or f"the CPU, {environment.cpu_count} cores"
    _say(f"on {where}: torch {environment.torch}, triton {environment.triton}")
    if device == "cpu":
        _say("no GPU: short lengths only, and no figure for a GPU follows from them")
    if arguments.lengths:
        lengths = arguments.lengths
    elif arguments.target:
        lengths = lengths_for(arguments.target, device)
    else:
        lengths = LENGTHS if device == "cuda" else VALIDATOR_LENGTHS
    found = sweep(
        arguments.tree,
        lengths,
        runs=arguments.runs,
        device=device,
        gated=not arguments.ungated,
        cold_cache=arguments.cold_cache,
        timeout=arguments.timeout,
        progress=lambda event, length, text: _say(f"{length:>9} tokens: {event} {text}"),
    )
    protocol = WORKLOAD.describe(device)
    commit = tree_commit(arguments.tree)
    return build_report(protocol, commit, found.measurements, found.failures), found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 when every length was measured, else 1 (2 for usage)."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "schema":
        sys.stdout.write(json.dumps(report_schema(), indent=2) + "\n")
        return 0
    if arguments.tree is None:
        parser.error("--tree is required: the root of a fork")
    try:
        report, found = _measure(arguments)
    except MeasurementError as error:
        _say(f"{error.kind}: {error.reason}")
        _say(error.log_tail)
        return 1
    if arguments.json:
        digest = write_report(arguments.json, report)
        _say(f"report: {arguments.json} (sha256 {digest[:16]})")
    sys.stdout.write(_table(found) + "\n")
    if not report.checked:
        sys.stdout.write("NOT CHECKED: correctness was not tested before these timings.\n")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
