"""Benchmark the public fork, as it is and with other kernels laid over it, on one machine.

    python scripts/benchmark_fork.py --fork PATH --out benchmarks/h200 [--tree NAME]

PATH is a checkout of the public fork (https://github.com/troy12x/flash-linear-attention). Each tree
gives one report of the harness, NAME.json. Correctness comes first: the gates of our trees and
check_layer.py, side by side. Then each tree is timed in fresh processes, one at a time, and ours
are profiled. The fork computes something else than the recurrence, and the peer misses a limit of
the gate with correlated keys: both are timed unchecked.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from measuring.results import project_commit

from harness.report import Failure, GateResult, Measurement, build_report, write_report
from harness.runner import MeasurementError, check, measure, probe
from harness.workload import LENGTHS, WORKLOAD
from quasar_kernels.contract import OVERLAY, QUASAR_DIR, check_tree, overlay_files

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "benchmarks" / "peer"
SOME_LENGTHS = (512, 2048, 16_384, 100_000, 1_000_000)
AT_ONCE = 10
"""Processes that start side by side: an import of the fork takes ten seconds of one core."""


class Tree(NamedTuple):
    """What is laid over the fork, `files` relative to `source`, and how it is measured."""

    source: Path
    files: tuple[PurePosixPath, ...] = ()
    ours: bool = False  # held to the rules of the fork's kernels
    lengths: tuple[int, ...] = SOME_LENGTHS
    gates: tuple[int, ...] = ()  # a length is timed behind the gate of the next of these
    cold: tuple[int, ...] = SOME_LENGTHS  # where the first process has empty kernel caches
    runs: int = 1  # processes a length
    profile: str | None = None


TREES = {
    "public-fork": Tree(ROOT),
    # it tunes for half a minute in empty caches, at every length alike
    "peer": Tree(PEER, (QUASAR_DIR / "chunk.py",), cold=(512,)),
    "overlay-ops": Tree(
        OVERLAY, tuple(overlay_files("ops")), ours=True, gates=(512, 100_000),
        profile="layer-profile-ops.json",
    ),
    "overlay": Tree(
        OVERLAY, tuple(overlay_files("layer")), ours=True, lengths=LENGTHS, gates=SOME_LENGTHS,
        cold=LENGTHS, runs=2, profile="layer-profile.json",
    ),
}  # fmt: skip
"""The fork as it is; the fork's layer over flash-linear-attention's delta rule; and this project's
kernels as FORK_SCOPE=ops and FORK_SCOPE=layer publish them."""

Gate = GateResult | Failure | None


def make_tree(fork: Path, folder: Path, tree: Tree) -> Path:
    """Copy the fork's package into `folder`, and the tree's files over it.

    Raises:
        SystemExit: one of this project's trees breaks a rule of the fork.
    """
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(fork / "fla", folder / "fla", ignore=ignore)
    for file in tree.files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree.source / file, folder / file)
    broken = check_tree(folder) if tree.ours else []
    if broken:
        sys.exit("\n".join(f"{v.path}: {v.rule} {v.remedy}" for v in broken))
    return folder


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


def script(name: str, *arguments: object) -> None:
    """Run another script of this folder; it says itself what went wrong."""
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    subprocess.run(command, check=False)


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
            pool.submit(script, "check_layer.py", *settings, "--out", out / "layer-accuracy.json")
        pool.shutdown()  # nothing else runs while something is timed
        for name in names:
            checked = {length: found.result() for length, found in gates[name].items()}
            found = time_tree(name, trees[name], checked, folder / "turn", device)
            report(found, out / f"{name}.json", commit)
            profile = TREES[name].profile
            if on_gpu and profile is not None:
                script("profile_layer.py", *settings, "--tree", name, "--out", out / profile)


def main() -> None:
    """Benchmark all trees, or some."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fork", type=Path, required=True, help="checkout of the public fork")
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--tree", action="append", choices=TREES, help="only this one, or these")
    parser.add_argument("--commit", help="this project's commit, where git cannot tell")
    args = parser.parse_args()
    commit = args.commit or project_commit()
    benchmark(args.tree or list(TREES), args.fork, args.out, commit)


if __name__ == "__main__":
    main()
