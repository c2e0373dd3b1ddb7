"""`python -m harness profile`: where the time of a call goes, by torch's profiler."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.measuring.job import Profile
from harness.measuring.runner import PROJECT, MeasurementError, Options, call
from harness.measuring.trees import whole_tree
from harness.workload import WORKLOAD
from quasar_kernels.arguments import output_file

TASK = "harness.worker.subject.profile"


def table(profile: Profile, most: int) -> str:
    """Return the operations that take longest, in markdown."""
    rows = [
        f"| {row.name[:80].replace('|', ' ')} | {row.calls:g} | {row.ms:.3f} | {row.share:.1%} |"
        for row in profile.rows[:most]
    ]
    head = f"| operation | a call | ms a call ({profile.device}) | share |"
    return "\n".join([head, "| --- | ---: | ---: | ---: |", *rows]) + "\n"


def ncu_command(tree: Path, length: int) -> str:
    """Return the command that profiles one call after the warm-ups with Nsight Compute."""
    words = [
        *["ncu", "--set", "full", "--profile-from-start", "off", "--export", "quasar", "--force"],
        *(sys.executable, "-m", TASK, str(tree), str(length), "cuda"),
    ]
    return f"PYTHONPATH={shlex.quote(str(PROJECT))} {shlex.join(words)}"


def main(argv: Sequence[str]) -> int:
    """Profile a tree, print the table and the trace's path; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness profile",
        description="Show which operations and kernels a call of a tree's layer spends its time "
        "in. Nothing is checked; a profiled call is slower than a timed one.",
    )
    parser.add_argument("--tree", type=Path, required=True, help="root of a fork, or an overlay")
    parser.add_argument("--length", type=int, default=2048, help="in tokens (2048)")
    parser.add_argument("--rows", type=int, default=20, help="of the table (20)")
    parser.add_argument(
        "--trace",
        type=output_file,
        default=Path("trace.json"),
        help="for chrome://tracing or ui.perfetto.dev (trace.json)",
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--timeout", type=float, default=WORKLOAD.timeout_seconds)
    parser.add_argument("--debug", action="store_true", help="print a failed worker's log")
    arguments = parser.parse_args(argv)
    if arguments.length < 1:
        parser.error(f"--length {arguments.length} must be at least 1")
    trace = arguments.trace.resolve()
    try:
        with whole_tree(arguments.tree) as tree:
            body = call(
                f"{TASK}:profile_tree",
                *(str(tree), arguments.length, arguments.device, str(trace)),
                options=Options(arguments.device, arguments.timeout),
                tree=tree,
            )
    except MeasurementError as error:
        sys.stderr.write(f"{error.explain(debug=arguments.debug)}\n")
        return 1
    sys.stdout.write(table(Profile.model_validate(body), arguments.rows))
    sys.stdout.write(f"\nthe trace of {WORKLOAD.timed_calls} calls is in {trace}\n")
    command = ncu_command(arguments.tree.resolve(), arguments.length)
    sys.stdout.write(f"one call in Nsight Compute: {command}\n")
    return 0
