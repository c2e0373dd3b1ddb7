"""The control run: a matrix product that a sound machine computes correctly."""

from __future__ import annotations

import torch

from harness.hardware.machine import Environment
from harness.worker.failures import WorkerError
from harness.worker.machine.environment import describe

SIZE = 512
TOLERANCE = 1e-2


def run_control(requested: str) -> Environment:
    """Multiply two matrices on the device and compare with the CPU; return the machine.

    Raises:
        WorkerError: the device is missing or computes a wrong product.
    """
    if requested == "cuda" and not torch.cuda.is_available():
        raise WorkerError("no CUDA device is visible to torch", "crash")
    device = torch.device("cuda" if torch.cuda.is_available() and requested != "cpu" else "cpu")
    left, right = torch.randn(2, SIZE, SIZE, dtype=torch.float64)
    exact = left @ right
    product = (left.float().to(device) @ right.float().to(device)).cpu().double()
    error = float((product - exact).norm() / exact.norm())
    if not error < TOLERANCE:
        raise WorkerError(f"a product of matrices on {device} is off by {error:.2g}", "crash")
    return describe(device)
