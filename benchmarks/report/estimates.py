"""Expected speeds of the layer on other cards, from kernels that were measured on one GPU.

docs/results/estimates.md explains the method. The estimated time of a call is a fixed part, that of
a call of 512 tokens, plus each kernel's time per token times the tokens.
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
"""Kernels of the Hopper path, and of the portable path with library products or fused kernels."""
LATENCY_TOKENS = 512
"""Length of a call that takes as long as its launches."""
LONG_TOKENS = 1_000_000
"""Length of a call that takes as long as its kernels."""
NEAR = 0.75
"""A kernel is limited by its bound if the bound is at least this share of its time."""


class Implementation(NamedTuple):
    """A path of the layer, with its kernels' times on one GPU."""

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
        measured_bound, bound = max(bounds), max(self._bounds(step, gpu))
        if not measured_bound:  # maps and their scan
            return max(same_cycles, time.ms * self.gpu.bandwidth / gpu.bandwidth)
        if measured_bound < NEAR * time.ms:
            return max(same_cycles, bound)
        near = time.ms * bound / measured_bound
        multiplies = step.kernels != GEMM and measured_bound == bounds[1]
        # other instructions than mma.sync may be necessary to reach a card's published rate
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
