"""GPUs by name: their memory, their hardware bounds, and the lengths that fit."""

from __future__ import annotations

from dataclasses import dataclass

from harness.hardware.roofline import bytes_per_token, operations_per_token
from harness.workload import LENGTHS, WORKLOAD, Workload

LAYER_BYTES_PER_TOKEN = 7400
"""Peak memory of the layer at a million recorded tokens: 6.82 GiB on an H200."""

KEPT_GIB = 3.0
"""Additional GiB that a recorded call may keep for its backward pass (QUASAR_KEEP_MIB)."""

SPARE = 0.85
"""Share of the memory that a call may use; driver, context and allocator use the rest."""


@dataclass(frozen=True)
class Gpu:
    """A card as its vendor describes it.

    Attributes:
        name: the driver's name, or the beginning of it.
        memory_gib: as sold; GB of HBM counted as GiB of the driver.
        bandwidth: of the memory, in bytes a second.
        operations: dense bf16 products with fp32 sums, in operations a second.
        capability: CUDA compute capability.
    """

    name: str
    memory_gib: float
    bandwidth: float
    operations: float
    capability: str


GPUS = (
    Gpu("NVIDIA A100-SXM4-40GB", 40, 1.555e12, 312e12, "8.0"),
    Gpu("NVIDIA A100-SXM4-80GB", 80, 2.039e12, 312e12, "8.0"),
    Gpu("NVIDIA H100 80GB HBM3", 80, 3.35e12, 989e12, "9.0"),
    Gpu("NVIDIA H200", 141, 4.8e12, 989e12, "9.0"),
    Gpu("NVIDIA GeForce RTX 3090", 24, 0.936e12, 71e12, "8.6"),
    Gpu("NVIDIA GeForce RTX 4090", 24, 1.008e12, 165e12, "8.9"),
    Gpu("NVIDIA L40S", 48, 0.864e12, 362e12, "8.9"),
)
"""From NVIDIA's data sheets."""


def known(name: str) -> Gpu | None:
    """Return the card that the driver calls `name`, if it is known."""
    return next((gpu for gpu in GPUS if name.startswith(gpu.name)), None)


def ceiling(gpu: Gpu, workload: Workload = WORKLOAD) -> float:
    """Return the tokens/s that nothing exceeds: inputs read and outputs written once, and products.

    For a card of the table; `roofline` uses the clocks of the present one.
    """
    moved, done = bytes_per_token(workload), operations_per_token(workload)
    return min(gpu.bandwidth / moved, gpu.operations / done)


def longest(memory_gib: float) -> int | None:
    """Return the longest measured length that fits into the memory, or None."""
    room = SPARE * memory_gib * 2**30
    fitting = [n for n in LENGTHS if n * LAYER_BYTES_PER_TOKEN + _kept(n) <= room]
    return max(fitting, default=None)


def _kept(length: int) -> float:
    # A call of 100,000 tokens keeps half a GiB; a call that exceeds `QUASAR_KEEP_MIB`, nothing.
    kept = length / 100_000 * 2**29
    return kept if kept <= KEPT_GIB * 2**30 else 0


def settings(memory_gib: float) -> dict[str, str]:
    """Return the lines of a .env that suit the memory."""
    target = longest(memory_gib)
    lines = {"TARGET_SEQUENCE_LENGTH": str(target) if target else "auto"}
    if memory_gib < 48:
        lines["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return lines
