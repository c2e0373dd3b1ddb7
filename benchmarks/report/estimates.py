"""Expected speeds of the layer on other cards, from kernels that were measured on one GPU.

The estimated time of a call is a fixed part plus each kernel's time per token times the tokens. The
fixed part, launches and the host's work, is the time of a call of 512 tokens. A kernel's time on
another card follows from published rates. A kernel's bound is the longer of the times for its bytes
and for its operations.

- A kernel near its bound keeps its share of the bound. If it is bound by operations of `mma.sync`,
  it takes at least as many cycles as on the measured GPU. Other instructions may be necessary to
  reach a card's published rate.
- A kernel far from its bound is limited by latencies within the multiprocessors. It takes the same
  number of cycles, or its bound on the other card if that is longer.
- The time of a kernel without a bound (maps and their scan) grows by the larger of the ratios of
  bandwidths and of cycles per second.

On every card, kernels are assumed to reach the same shares of the published rates: the bandwidth's
share that a copy reached on the measured GPU, and the operations' share that a large product did.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.cases.layer import by_length
from benchmarks.engine.results import DATA, ROOT, Run, load
from benchmarks.report.layer_steps import GEMM, STEPS, Step, StepTime, find_steps
from harness.hardware.gpus import Gpu, known

SPEEDS = DATA / "overlay.json"
"""Speeds by length. The shortest call gives the time of launches and host for all paths."""
HOPPER = DATA / "layer-profile.json"
PORTABLE = DATA / "layer-profile-portable.json"
FUSED = ROOT / "benchmarks" / "h100" / "layer-profile-fused.json"
"""The kernels of the paths: Hopper's, the portable one's, and the portable one's fused kernels."""
LATENCY_TOKENS = 512
"""Length of a call that takes as long as its launches."""
LONG_TOKENS = 1_000_000
"""Length of a call that takes as long as its kernels."""
NEAR = 0.75
"""A kernel is limited by its bound if the bound is at least this share of its time."""


class Implementation(NamedTuple):
    """A path of the layer as it was measured on one GPU."""

    name: str
    gpu: Gpu
    kernels: Run  # of `layer_profile`
    latency_ms: float  # of a call of 512 tokens
    mma_sync: bool  # whether its own kernels (not the library's) multiply by `mma.sync`

    def call_ms(self, tokens: int, gpu: Gpu) -> float:
        times = find_steps(self.kernels.entries, STEPS[str(self.kernels.settings["tree"])])
        busy = sum(self._on(gpu, time) for time in times)
        return self.latency_ms + busy * tokens / self.kernels.number("tokens")

    def speed(self, tokens: int, gpu: Gpu) -> float:
        return tokens / self.call_ms(tokens, gpu) * 1e3

    def _on(self, gpu: Gpu, time: StepTime) -> float:
        """Return the estimated milliseconds of a step's kernels on a card."""
        step, bounds = time.step, self._bounds(time.step, self.gpu)
        same_cycles = time.ms * self.gpu.cycles / gpu.cycles
        here, there = max(bounds), max(self._bounds(step, gpu))
        if not here:
            return max(same_cycles, time.ms * self.gpu.bandwidth / gpu.bandwidth)
        if here < NEAR * time.ms:
            return max(same_cycles, there)
        near = time.ms * there / here
        multiplies = step.kernels != GEMM and here == bounds[1]
        return max(same_cycles, near) if self.mma_sync and multiplies else near

    @property
    def copy_share(self) -> float:
        """The share of its published bandwidth that a copy reached."""
        return self.kernels.number("copy_gb_per_s") * 1e9 / self.gpu.bandwidth

    @property
    def product_share(self) -> float:
        """The share of its published rate that a large bf16 product reached."""
        return self.kernels.number("product_tflops") * 1e12 / self.gpu.operations

    def _bounds(self, step: Step, gpu: Gpu) -> tuple[float, float]:
        """Return the milliseconds of a step's bytes and of its operations on a card."""
        bandwidth, rate = self.copy_share * gpu.bandwidth, self.product_share * gpu.operations
        return step.bounds_ms(self.kernels.number("tokens"), bandwidth, rate)


class Estimates(NamedTuple):
    """The expected speeds on cards that were not measured."""

    hopper: Implementation
    portable: Implementation
    fused: Implementation

    @classmethod
    def load(cls) -> Estimates:
        """Read the measurements.

        Raises:
            OSError, pydantic.ValidationError: a file is missing, or is not a run.
            ValueError: a GPU is not in the table of cards.
        """
        latency_ms = LATENCY_TOKENS / speeds(load(SPEEDS))[LATENCY_TOKENS] * 1e3

        def read(name: str, path: Path, *, mma_sync: bool) -> Implementation:
            profile = load(path)
            gpu = known(profile.gpu)
            if gpu is None:
                raise ValueError(f"{path} was measured on {profile.gpu}, which is not known")
            return Implementation(name, gpu, profile, latency_ms, mma_sync)

        return cls(
            read("Hopper", HOPPER, mma_sync=False),
            read("portable", PORTABLE, mma_sync=True),
            read("portable, fused", FUSED, mma_sync=True),
        )

    def path(self, gpu: Gpu) -> Implementation:
        """Return the implementation that a card runs by default: the faster one in a long call."""
        if gpu.hopper:
            return self.hopper
        return max(self.portable, self.fused, key=lambda path: path.speed(LONG_TOKENS, gpu))

    def speed(self, tokens: int, gpu: Gpu) -> float:
        return self.path(gpu).speed(tokens, gpu)


def speeds(run: Run) -> Mapping[int, float]:
    """Return the median tokens/s of a run of `layer` by length."""
    return {
        tokens: median(process.figures["tokens_per_sec"] for process in processes)
        for tokens, processes in by_length(run).items()
    }
