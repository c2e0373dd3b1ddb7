"""The measured trees: the public fork, alone and with other files copied over it."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from benchmarks.engine.commands import fork_option
from benchmarks.engine.results import ROOT
from harness.worker.subject.tree import Loaded, load_tree
from harness.workload import LENGTHS
from quasar_kernels.contract import OVERLAY, QUASAR_DIR, check_tree, overlay_files
from quasar_kernels.fla_package import lay_over_fla

BASELINE = ROOT / "benchmarks" / "baseline"
SHORT = 4096
"""Tokens up to which a call is limited by the host; its speed differs between processes."""
SOME_LENGTHS = (512, 2048, 16_384, 100_000, 1_000_000)
HOPPER = "HOPPER = (9, 0)\n"
"""The line of cuda/nvrtc.py that names Hopper's compute capability."""


class Tree(NamedTuple):
    """Files copied over the fork (relative to `source`), and how the tree is measured."""

    source: Path
    files: tuple[PurePosixPath, ...] = ()
    ours: bool = False  # whether the tree must keep the rule book
    portable: bool = False  # without the instructions that only Hopper has, as on other GPUs
    lengths: tuple[int, ...] = SOME_LENGTHS
    # Lengths that are checked for correctness. Other lengths rely on the check of the next longer
    # one, or else of the longest. A length is timed only if the check that it relies on passed.
    checks: tuple[int, ...] = ()
    cold: tuple[int, ...] = SOME_LENGTHS  # lengths with empty kernel caches at first
    runs: int = 1  # processes per length
    short_runs: int = 1  # the same up to SHORT tokens

    @property
    def has_layer(self) -> bool:
        """Whether the tree has this project's layer; its memory can be computed."""
        return PurePosixPath("fla/layers/quasar.py") in self.files

    def fitting(self, fits: Callable[[int], bool]) -> Tree:
        """Return the tree without the lengths that do not fit into a GPU's memory."""
        lengths, checks = (tuple(filter(fits, tokens)) for tokens in (self.lengths, self.checks))
        return self._replace(lengths=lengths, checks=checks)

    def due(self, already: int) -> list[int]:
        """Return the lengths that need more than `already` processes."""
        runs = {n: self.short_runs if n <= SHORT else self.runs for n in self.lengths}
        return [n for n in self.lengths if already < runs[n]]


TREES = {
    # with empty caches, both tune for half a minute at any length
    "public-fork": Tree(ROOT, cold=(512,)),
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
        short_runs=3,
    ),
    "overlay-portable": Tree(
        OVERLAY,
        tuple(overlay_files("layer")),
        ours=True,
        portable=True,
        lengths=(512, 2048, 16_384, 65_536, 100_000, 262_144, 1_000_000),
        checks=(100_000,),
        cold=(),
    ),
}
"""The trees by name.

- `public-fork`: the fork without changes.
- `baseline`: the fork's layer over flash-linear-attention's delta rule.
- `overlay-ops`, `overlay`: this project's kernels as FORK_SCOPE=ops and FORK_SCOPE=layer publish
  them.
- `overlay-portable`: the latter with the code that other GPUs than Hopper run.
"""


def make_tree(fork: Path | None, folder: Path, tree: Tree) -> Path:
    """Copy the fork's package into `folder`, and the tree's files over it.

    Args:
        fork: a checkout of the public fork; None for the installed fla, which has no layer.

    Raises:
        SystemExit: the tree needs the fork's layer, or one of this project's trees breaks the rule
            book.
    """
    if fork is None:
        if not tree.has_layer:
            sys.exit("this tree contains the public fork's layer: name a checkout with --fork")
        lay_over_fla(tree.source, folder)
    else:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(fork / "fla", folder / "fla", ignore=ignore)
    for file in tree.files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree.source / file, folder / file)
    broken = check_tree(folder) if tree.ours else []
    if broken:
        sys.exit("\n".join(f"{v.path}: {v.rule} {v.remedy}" for v in broken))
    if tree.portable:
        _without_hopper(folder / QUASAR_DIR / "cuda" / "nvrtc.py")
    return folder


def options(parser: argparse.ArgumentParser) -> None:
    fork_option(parser, required=False)
    parser.add_argument("--tree", choices=TREES, default="overlay")


@contextmanager
def loaded(fork: Path | None, tree: Tree) -> Iterator[Loaded]:
    """Make a tree in a temporary folder and load it into this process.

    Args, raises: as `make_tree`.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield load_tree(make_tree(fork, Path(folder).resolve(), tree))


def _without_hopper(nvrtc: Path) -> None:
    """Change nvrtc.py so that no GPU counts as Hopper and kernels are compiled without `wgmma`."""
    text = nvrtc.read_text(encoding="utf-8")
    if text.count(HOPPER) != 1:
        raise ValueError(f"{nvrtc} must contain the line {HOPPER!r} once")
    nvrtc.write_text(text.replace(HOPPER, "HOPPER = (0, 0)\n"), encoding="utf-8")
