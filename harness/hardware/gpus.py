"""GPUs by name: their rates and memory, their hardware bounds, and the lengths that fit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from harness.hardware.roofline import bytes_per_token, operations_per_token
from harness.workload import LENGTHS
from quasar_kernels.memory import Way, is_fused, largest_length, peak_bytes

OTHERS_GIB = 1.25
"""Memory of the CUDA contexts of a worker's two processes."""

SPARE = 0.85
"""Share of the remaining memory that tensors may use. The rest is for a display and for torch's
allocator, which caches up to a quarter of the tensors' memory and frees it only when an allocation
would fail. The value was not tested on small cards."""

LEAGUE, HIGHEST = 100_000, 1_000_000
"""Leagues after the first begin at multiples of LEAGUE, the last one at HIGHEST. Within a league
the speed hardly depends on the length, so `best_target` tries only these multiples, and LENGTHS
below LEAGUE."""


@dataclass(frozen=True)
class Gpu:
    """A card's specification by its vendor."""

    name: str  # the driver's name, or its beginning
    memory_gib: float  # the advertised size; GB of HBM are counted as GiB
    bandwidth: float  # of the memory, in bytes per second
    operations: float  # of dense bf16 products with fp32 sums, per second
    cycles: float  # of all multiprocessors together at the boost clock, per second
    capability: str  # CUDA compute capability
    source: str  # NVIDIA's document with these figures

    @property
    def label(self) -> str:
        """The name without its vendor."""
        return self.name.removeprefix("NVIDIA ")

    @property
    def hopper(self) -> bool:
        """Whether the card has the instructions that the kernels for Hopper use."""
        return self.capability == "9.0"


GPUS = (
    Gpu("NVIDIA A100-SXM4-40GB", 40, 1.555e12, 312e12, 108 * 1.41e9, "8.0", "A100 data sheet"),
    Gpu("NVIDIA A100-SXM4-80GB", 80, 2.039e12, 312e12, 108 * 1.41e9, "8.0", "A100 data sheet"),
    Gpu("NVIDIA H100 80GB HBM3", 80, 3.35e12, 989e12, 132 * 1.83e9, "9.0", "H100 data sheet"),
    Gpu("NVIDIA H200", 141, 4.8e12, 989e12, 132 * 1.83e9, "9.0", "H200 data sheet"),
    Gpu("NVIDIA GeForce RTX 3090", 24, 0.936e12, 71e12, 82 * 1.695e9, "8.6", "GA102 whitepaper"),
    Gpu("NVIDIA GeForce RTX 4090", 24, 1.008e12, 165e12, 128 * 2.52e9, "8.9", "Ada whitepaper"),
    Gpu("NVIDIA L40S", 48, 0.864e12, 362e12, 142 * 2.52e9, "8.9", "L40S data sheet"),
    Gpu(
        "NVIDIA GeForce RTX 5090",
        32,
        1.792e12,
        209.5e12,
        170 * 2.407e9,
        "12.0",
        "RTX Blackwell whitepaper",
    ),
    Gpu("NVIDIA B200", 180, 8e12, 2250e12, 148 * 1.85e9, "10.0", "HGX B200 data sheet"),
)


_MIG = re.compile(r" MIG (?P<sevenths>\d)g\.(?P<gib>\d+)gb")


def known(name: str) -> Gpu | None:
    """Return the card that the driver calls `name`, or the MIG slice of a card, if it is known."""
    card = next((gpu for gpu in GPUS if name.startswith(gpu.name)), None)
    mig = _MIG.search(name)
    if card is None or mig is None:
        return card
    gib = float(mig["gib"])
    return replace(
        card,
        name=name,
        memory_gib=gib,
        bandwidth=card.bandwidth * min(1, gib / card.memory_gib),
        operations=card.operations * int(mig["sevenths"]) / 7,
        cycles=card.cycles * int(mig["sevenths"]) / 7,
    )


def published_bound(gpu: Gpu) -> float:
    """Return the bound in tokens/s by the vendor's memory bandwidth and operations."""
    return min(gpu.bandwidth / bytes_per_token(), gpu.operations / operations_per_token())


def usable_bytes(memory_gib: float) -> float:
    """Return the bytes of a GPU's memory that the tensors of a call may use."""
    return max(0.0, SPARE * (memory_gib - OTHERS_GIB)) * 2**30


def measuring_bytes(length: int, capability: str | None) -> int:
    """Return the bytes of a GPU's memory that a check of the layer at this length needs.

    They include the referee's copies of the input and the output.
    """
    return peak_bytes(length, fused=is_fused(capability)) + length * bytes_per_token()


def fits(length: int, memory_gib: float, capability: str | None) -> bool:
    """Return whether the layer's check and its timed calls at this length fit into the memory."""
    return measuring_bytes(length, capability) <= usable_bytes(memory_gib)


def longest(memory_gib: float, capability: str | None, way: Way = "recorded") -> int:
    """Return the largest number of tokens of a call that fits into the memory; 0 if none fits."""
    return largest_length(usable_bytes(memory_gib), way, fused=is_fused(capability))


def best_target(memory_gib: float, capability: str | None) -> int | None:
    """Return the start of the highest league that fits, else the longest of LENGTHS, or None."""
    leagues = range(LEAGUE, HIGHEST + 1, LEAGUE)
    candidates = sorted({*leagues, *(n for n in LENGTHS if n < LEAGUE)}, reverse=True)
    return next((n for n in candidates if fits(n, memory_gib, capability)), None)


def settings(memory_gib: float, capability: str | None) -> dict[str, str]:
    """Return the recommended settings in a .env for this memory, as names and values."""
    target = best_target(memory_gib, capability)
    lines = {"TARGET_SEQUENCE_LENGTH": str(target) if target else "auto"}
    if memory_gib < 48:
        lines["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return lines
