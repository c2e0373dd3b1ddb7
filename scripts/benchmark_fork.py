"""Benchmark the public fork as it is and with the overlay laid over it, on one machine.

    python scripts/benchmark_fork.py --fork PATH --out benchmarks/h200

PATH is a checkout of the public fork (https://github.com/troy12x/flash-linear-attention). The
public fork is timed unchecked, since it computes something else than the recurrence; the overlay
passes the gate first. Writes public-fork.json and overlay.json, reports of the harness.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.report import build_report, write_report
from harness.runner import probe
from harness.sweep import sweep
from harness.workload import LENGTHS, WORKLOAD
from quasar_kernels.contract import OVERLAY, check_tree

ROOT = Path(__file__).resolve().parent.parent
TREES = ("public-fork", "overlay")


def project_commit() -> str | None:
    """Return the commit of this project's checkout, or None outside of one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def make_tree(fork: Path, folder: Path, *, overlaid: bool) -> Path:
    """Copy the fork's package into `folder`, with the overlay over it when asked."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(fork / "fla", folder / "fla", ignore=ignore)
    if overlaid:
        shutil.copytree(OVERLAY / "fla", folder / "fla", dirs_exist_ok=True, ignore=ignore)
        broken = check_tree(folder)
        if broken:
            sys.exit("\n".join(f"{v.path}: {v.rule} {v.remedy}" for v in broken))
    return folder


def benchmark(name: str, args: argparse.Namespace, device: str, folder: Path) -> None:
    """Measure one tree and write its report."""
    ours = name == "overlay"
    tree = make_tree(args.fork, folder / name, overlaid=ours)
    found = sweep(
        tree,
        [int(n) for n in args.lengths.split(",")] if args.lengths else LENGTHS,
        runs=args.runs if ours else 1,
        device=device,
        gated=ours,
        cold_cache=True,
        progress=lambda event, length, text: print(f"{name:>12} {length:>8} {event} {text}"),
    )
    commit = args.commit or project_commit()
    protocol = WORKLOAD.describe(device)
    report = build_report(protocol, commit, found.measurements, found.failures)
    write_report(args.out / f"{name}.json", report)


def main() -> None:
    """Benchmark the trees one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fork", type=Path, required=True, help="checkout of the public fork")
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--tree", choices=TREES, help="only this one")
    parser.add_argument("--lengths", help="sequence lengths, such as 512,1024 (default: all)")
    parser.add_argument("--runs", type=int, default=3, help="processes per length of the overlay")
    parser.add_argument("--commit", help="this project's commit, where git cannot tell")
    args = parser.parse_args()
    device = probe().device
    with tempfile.TemporaryDirectory() as folder:
        for name in TREES if args.tree is None else (args.tree,):
            benchmark(name, args, device, Path(folder))


if __name__ == "__main__":
    main()
