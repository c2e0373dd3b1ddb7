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
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine import commands
from benchmarks.layer.trees import TREES, make_tree
from benchmarks.results import ROOT
from harness.measuring.runner import (
    MeasurementError,
    Options,
    check,
    confirm,
    measure,
    probe,
    require_passed,
)
from harness.report import build_report, write_report
from harness.sample import Correctness, Failure, Sample
from harness.source import tree_commit
from harness.workload import WORKLOAD

AT_ONCE = 10
"""Processes that start side by side: an import of the fork takes ten seconds of one core."""


def say(name: str, length: int, text: str) -> None:
    """Report progress."""
    print(f"{name:>12} {length:>8} {text}", flush=True)


def check_tree(name: str, tree: Path, length: int, device: str) -> Correctness | Failure:
    """Check one tree at one length."""
    try:
        result = check(tree, length, Options(device))
    except MeasurementError as error:
        say(name, length, f"check: {error.kind}: {error.reason}")
        return Failure(length=length, kind=error.kind, reason=error.reason)
    failed = "; ".join(map(str, result.failed))
    say(name, length, f"check of {result.seconds:.1f} s: {failed or 'passed'}")
    return result


@dataclass
class TreeSamples:
    """The samples of one tree; a length is timed after the check of the next of `checks`."""

    name: str
    tree: Path
    checks: Mapping[int, Correctness | Failure]
    gpu_lock: Path
    options: Options
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def take(self, length: int, cold_cache: bool) -> None:
        """Take one sample; a failure costs the length its earlier ones."""
        try:
            sample = self._sample(length, cold_cache=cold_cache)
        except MeasurementError as error:
            self.samples[:] = [one for one in self.samples if one.length != length]
            self.failures.append(Failure(length=length, kind=error.kind, reason=error.reason))
            say(self.name, length, f"{error.kind}: {error.reason}\n{error.log_tail[-2000:]}")
        else:
            self.samples.append(sample)
            say(self.name, length, f"{sample.tokens_per_sec / 1e6:.3f} M tokens/s")

    def _sample(self, length: int, *, cold_cache: bool) -> Sample:
        correctness = self._check_of(length)
        sample = measure(
            *(self.tree, length, self.options),
            cross_check=correctness is not None,
            cold_cache=cold_cache,
            gpu_lock=self.gpu_lock,
        )
        return sample if correctness is None else confirm(sample, correctness)

    def _check_of(self, length: int) -> Correctness | None:
        """Return the check of the next length, or of the longest; None where there are none."""
        if not self.checks:
            return None
        place = min((n for n in self.checks if n >= length), default=max(self.checks))
        result = self.checks[place]
        if isinstance(result, Failure):
            raise MeasurementError(result.reason, result.kind)
        return require_passed(result)


def time_tree(
    name: str, tree: Path, checks: Mapping[int, Correctness | Failure], gpu_lock: Path, device: str
) -> TreeSamples:
    """Time a tree at its lengths, in rounds whose processes start together."""
    plan = TREES[name]
    measured = TreeSamples(name, tree, checks, gpu_lock, Options(device))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for already in range(max(plan.runs, plan.short_runs)):
            failed = {failure.length for failure in measured.failures}
            due = [n for n in plan.due(already) if n not in failed]
            cold = [already == 0 and n in plan.cold for n in due]
            list(pool.map(measured.take, due, cold))
    return measured


def report(measured: TreeSamples, path: Path, commit: str | None) -> None:
    """Write a tree's report."""
    kept = sorted(measured.samples, key=lambda m: m.length)
    protocol = WORKLOAD.describe(probe().device)
    write_report(path, build_report(protocol, commit, kept, measured.failures))


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
            name: {
                n: pool.submit(check_tree, name, trees[name], n, device) for n in TREES[name].gates
            }
            for name in names
        }
        if on_gpu and "overlay" in names:
            pool.submit(run, "accuracy", *settings, "--out", out / "layer-accuracy.json")
        pool.shutdown()  # nothing else runs while something is timed
        for name in names:
            checked = {length: found.result() for length, found in gates[name].items()}
            measured = time_tree(name, trees[name], checked, folder / "gpu-lock", device)
            report(measured, out / f"{name}.json", commit)
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
