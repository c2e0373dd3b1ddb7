"""Checks the rules on the files of an untrusted tree."""

from __future__ import annotations

from pathlib import Path

from harness.hardware.machine import Frozen
from quasar_kernels.contract import check_tree, compiled_files


class BrokenRules(Frozen):
    """The rules that a tree breaks, a sentence each."""

    sentences: tuple[str, ...]


def find_broken_rules(tree: str) -> BrokenRules:
    """Return the fork's rules that `tree` breaks, unreadable compiled code included."""
    root = Path(tree)
    compiled = [f"{path}: The file is compiled code." for path in compiled_files(root)[:3]]
    return BrokenRules(sentences=(*compiled, *map(str, check_tree(root))))
