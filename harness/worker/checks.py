"""A worker's checks for a validator: a tree's rules, the packages, the machine's arithmetic."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from harness.hardware.machine import Frozen
from harness.terminal import one_line
from harness.worker.failures import WorkerError
from quasar_kernels.contract import check_tree, compiled_files, fork_imports

SIZE, TOLERANCE = 512, 1e-2
"""Rows of the matrices of the control run, and its largest relative error."""


class Problems(Frozen):
    """The problems that a check found, one printable text for each."""

    texts: tuple[Annotated[str, BeforeValidator(one_line)], ...] = ()


def find_broken_rules(tree: str) -> Problems:
    """Return the fork's rules that `tree` breaks; each compiled file breaks one."""
    root = Path(tree)
    compiled = [f"{path}: The file is compiled code." for path in compiled_files(root)[:3]]
    return Problems(texts=(*compiled, *map(str, check_tree(root))))


def find_missing() -> Problems:
    """Import torch and Triton, look for a fork's other packages, and return the missing ones."""
    missing = []
    for name in ("torch", "triton"):
        try:
            importlib.import_module(name)
        except Exception as error:  # a library that cannot be loaded raises OSError, for one
            missing.append(f"{name} ({type(error).__name__}: {error})")
    packages = {module.partition(".")[0] for module in fork_imports()} | {"fla"}
    for name in sorted(packages - {"torch", "triton"}):
        if importlib.util.find_spec(name) is None:
            missing.append(f"{name} (not found)")
    return Problems(texts=tuple(missing))


def run_control(requested: str) -> Problems:
    """Multiply two matrices on the device; raise a WorkerError if the CPU's differs."""
    import torch  # the other checks work without it

    from harness.worker.machine.environment import device_of

    device = device_of(requested)
    left, right = torch.randn(2, SIZE, SIZE, dtype=torch.float64)
    exact = left @ right
    product = (left.float().to(device) @ right.float().to(device)).cpu().double()
    error = float((product - exact).norm() / exact.norm())
    if not error < TOLERANCE:
        raise WorkerError(f"a product of matrices on {device} is off by {error:.2g}", "crash")
    return Problems()
