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
from pathlib import Path

from benchmarks import commands
from benchmarks.layer.trees import TREES, make_tree
from benchmarks.results import project_commit
from harness.report import Failure, GateResult, Measurement, build_report, write_report
from harness.runner import MeasurementError, check, measure, probe
from harness.workload import WORKLOAD

AT_ONCE = 10
"""Processes that start side by side: an import of the fork takes ten seconds of one core."""


Gate = GateResult | Failure | None


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


def time_one(
    name: str, tree: Path, length: int, gate: Gate, cold: bool, turn: Path, device: str
) -> Measurement | Failure:
    """Time one tree at one length in a fresh process, unless its gate has failed."""
    if isinstance(gate, Failure):
        return gate.model_copy(update={"length": length})
    behind = False if gate is None else gate
    try:
        found = measure(tree, length, device=device, gate=behind, cold_cache=cold, turn=turn)
    except MeasurementError as error:
        say(name, length, f"{error.kind}: {error.reason}\n{error.log_tail[-2000:]}")
        return Failure(length=length, kind=error.kind, reason=error.reason)
    say(name, length, f"{found.tokens_per_sec / 1e6:.3f} M tokens/s")
    return found


def gate_of(length: int, gates: Mapping[int, Gate]) -> Gate:
    """Return the gate of the next length, or of the longest; None where there are no gates."""
    if not gates:
        return None
    return gates[min((n for n in gates if n >= length), default=max(gates))]


def time_tree(
    name: str, tree: Path, gates: Mapping[int, Gate], turn: Path, device: str
) -> list[Measurement | Failure]:
    """Time a tree at its lengths, in batches whose processes start together."""
    plan = TREES[name]
    jobs = []
    for number in range(plan.runs):
        for length in plan.lengths:
            behind = gate_of(length, gates)
            cold = number == 0 and length in plan.cold
            jobs.append((name, tree, length, behind, cold, turn, device))
    found: list[Measurement | Failure] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(0, len(jobs), AT_ONCE):
            found += pool.map(lambda job: time_one(*job), jobs[start : start + AT_ONCE])
    return found


def report(found: Sequence[Measurement | Failure], path: Path, commit: str | None) -> None:
    """Write a tree's report; a length that has failed once gives no measurement."""
    failures = {f.length: f for f in found if isinstance(f, Failure)}
    kept = [m for m in found if isinstance(m, Measurement) and m.length not in failures]
    kept.sort(key=lambda m: m.length)
    protocol = WORKLOAD.describe(probe().device)
    write_report(path, build_report(protocol, commit, kept, list(failures.values())))


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
            found = time_tree(name, trees[name], checked, folder / "turn", device)
            report(found, out / f"{name}.json", commit)
            profile = TREES[name].profile
            if on_gpu and profile is not None:
                run("profile", *settings, "--tree", name, "--out", out / profile)


def main() -> None:
    """Measure all trees, or some."""
    parser = commands.options(__doc__, fork=True)
    parser.add_argument("--tree", action="append", choices=TREES, help="only this one, or these")
    args = parser.parse_args()
    commit = args.commit or project_commit()
    benchmark(args.tree or list(TREES), args.fork, args.out, commit)


if __name__ == "__main__":
    main()
