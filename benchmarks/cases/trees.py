"""The measured trees: the public fork, alone and with files copied over it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from benchmarks.engine.results import ROOT
from harness.workload import LENGTHS
from quasar_kernels.contract import OVERLAY, QUASAR_DIR, check_tree, overlay_files

BASELINE = ROOT / "benchmarks" / "peer"
SHORT = 4096
"""Tokens up to which a call is limited by the host, whose speed differs between processes."""
SOME_LENGTHS = (512, 2048, 16_384, 100_000, 1_000_000)


class Tree(NamedTuple):
    """Files that are copied over the fork, relative to `source`, and their measurement."""

    source: Path
    files: tuple[PurePosixPath, ...] = ()
    ours: bool = False  # held to the rules of the fork's kernels
    lengths: tuple[int, ...] = SOME_LENGTHS
    checks: tuple[int, ...] = ()  # a length is timed after the check of the next of these
    cold: tuple[int, ...] = SOME_LENGTHS  # where the first process has empty kernel caches
    runs: int = 1  # processes a length
    short_runs: int = 1  # the same of up to SHORT tokens

    def due(self, already: int) -> list[int]:
        """Return the lengths that need more than `already` processes."""
        runs = {n: self.short_runs if n <= SHORT else self.runs for n in self.lengths}
        return [n for n in self.lengths if already < runs[n]]


TREES = {
    "public-fork": Tree(ROOT),
    # it tunes for half a minute in empty caches, at every length alike
    "baseline": Tree(BASELINE, (QUASAR_DIR / "chunk.py",), cold=(512,)),
    "overlay-ops": Tree(
        OVERLAY,
        tuple(overlay_files("ops")),
        ours=True,
        checks=(512, 100_000),
    ),
    "overlay": Tree(
        OVERLAY,
        tuple(overlay_files("layer")),
        ours=True,
        lengths=LENGTHS,
        checks=SOME_LENGTHS,
        cold=LENGTHS,
        runs=2,
        short_runs=6,
    ),
}
"""The unchanged fork; the fork's layer over flash-linear-attention's delta rule; and this project's
kernels as FORK_SCOPE=ops and FORK_SCOPE=layer publish them."""


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
