"""Time the public fork, as it is and with other kernels laid over it, on one machine.

    python -m benchmarks.layer.speed --fork PATH --out benchmarks/h200 [--tree NAME]

PATH is a checkout of the public fork (https://github.com/troy12x/flash-linear-attention). Each tree
gives one report of the harness, NAME.json. Correctness comes first: the gates of our trees and
benchmarks.layer.accuracy, side by side. Then each tree is timed in fresh processes, one at a time,
and ours are profiled. The fork computes something else than the recurrence, and the peer misses a
limit of the gate with correlated keys: both are timed unchecked.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from benchmarks.engine import commands
from benchmarks.layer.trees import TREES, make_tree
from benchmarks.results import ROOT
from harness.measuring.runner import MeasurementError, check, measure, probe
from harness.measuring.series import Policy, Series
from harness.report import Failure, GateResult, Kind, Measurement, build_report, write_report
from harness.source import tree_commit
from harness.workload import WORKLOAD

AT_ONCE = 10
"""Processes that start side by side: an import of the fork takes ten seconds of one core."""


def say(name: str, length: int, text: str) -> None:
    """Report progress."""
    print(f"{name:>12} {length:>8} {text}", flush=True)


def gate(name: str, tree: Path, length: int, device: str) -> GateResult | Failure:
    """Check one tree at one length."""
    try:
        found = check(tree, length, device=device)
    except MeasurementError as error:
        say(name, length, f"gate: {error.kind}: {error.reason}")
        return Failure(length=length, kind=error.kind, reason=error.reason)
    failed = "; ".join(map(str, found.failed))
    say(name, length, f"gate of {found.seconds:.1f} s: {failed or 'green'}")
    return found


@dataclass(kw_only=True)
class TreeSeries(Series):
    """The measurements of one tree; a length is timed behind the gate of the next of `gates`."""

    name: str
    gates: Mapping[int, GateResult | Failure]

    def gate_of(self, length: int) -> bool | GateResult:
        """Return the gate of the next length, or of the longest; False where there are none."""
        if not self.gates:
            return False
        gate = self.gates[min((n for n in self.gates if n >= length), default=max(self.gates))]
        if isinstance(gate, Failure):
            raise MeasurementError(gate.reason, gate.kind)
        return gate

    def measured(self, measurement: Measurement) -> None:
        """Say how fast it was."""
        say(self.name, measurement.length, f"{measurement.tokens_per_sec / 1e6:.3f} M tokens/s")

    def failed(self, length: int, error: MeasurementError) -> None:
        """Say why there is no speed."""
        say(self.name, length, f"{error.kind}: {error.reason}\n{error.log_tail[-2000:]}")


def time_tree(
    name: str, tree: Path, gates: Mapping[int, GateResult | Failure], turn: Path, device: str
) -> TreeSeries:
    """Time a tree at its lengths, in rounds whose processes start together."""
    plan = TREES[name]
    policy = Policy(plan.runs, cold=plan.cold, left_out=frozenset(get_args(Kind)))
    timed = partial(measure, turn=turn)
    series = TreeSeries(tree, policy, device, measure=timed, name=name, gates=gates)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for already in range(max(plan.runs, plan.short_runs)):
            failed = {failure.length for failure in series.failures}
            list(pool.map(series.take, [n for n in plan.due(already) if n not in failed]))
    return series


def report(series: Series, path: Path, commit: str | None) -> None:
    """Write a tree's report."""
    kept = sorted(series.measurements, key=lambda m: m.length)
    protocol = WORKLOAD.describe(probe().device)
    write_report(path, build_report(protocol, commit, kept, series.failures))


def run(module: str, *arguments: object) -> None:
    """Run another command of this folder; it says itself what went wrong."""
    subprocess.run(commands.python(f"benchmarks.layer.{module}", *arguments), check=False)


def benchmark(names: Sequence[str], fork: Path, out: Path, commit: str | None) -> None:
    """Check the trees side by side, then time and profile them one after the other."""
    device = probe().device
    settings = ("--fork", fork, *(("--commit", commit) if commit else ()))
    on_gpu = device == "cuda"
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name)
        trees = {name: make_tree(fork, folder / name, TREES[name]) for name in names}
        gates = {
            name: {n: pool.submit(gate, name, trees[name], n, device) for n in TREES[name].gates}
            for name in names
        }
        if on_gpu and "overlay" in names:
            pool.submit(run, "accuracy", *settings, "--out", out / "layer-accuracy.json")
        pool.shutdown()  # nothing else runs while something is timed
        for name in names:
            checked = {length: found.result() for length, found in gates[name].items()}
            series = time_tree(name, trees[name], checked, folder / "turn", device)
            report(series, out / f"{name}.json", commit)
            profile = TREES[name].profile
            if on_gpu and profile is not None:
                run("profile", *settings, "--tree", name, "--out", out / profile)


def main() -> None:
    """Measure all trees, or some."""
    parser = commands.options(__doc__, fork=True)
    parser.add_argument("--tree", action="append", choices=TREES, help="only this one, or these")
    args = parser.parse_args()
    commit = args.commit or tree_commit(ROOT)
    benchmark(args.tree or list(TREES), args.fork, args.out, commit)


if __name__ == "__main__":
    main()
