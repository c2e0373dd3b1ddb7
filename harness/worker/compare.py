"""A tensor's errors against its exact value, and their limits."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from harness.sample import Check
from harness.terminal import printable

PARTS = 8
"""The token dimension is compared as a whole and in this many parts, since errors may grow."""


@dataclass(frozen=True)
class Figures:
    """Errors of a tensor; NaN or infinite if one of its elements is."""

    relative_rms: float
    worst_part: float
    max_difference: float
    cosine: float
    size: float  # root mean square of the exact values


def _ratio(error: float, size: float) -> float:
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return math.sqrt(error / size)


def figures(actual: Tensor, expected: Tensor) -> Figures:
    """Compare two tensors `[B, T, ...]` of one shape in float64, part by part to save memory."""
    largest = 0.0
    errors, sizes, dot, norm = [], [], 0.0, 0.0
    length = actual.shape[1]
    bounds = sorted({length * part // PARTS for part in range(PARTS + 1)})
    for start, stop in pairwise(bounds):
        a = actual[:, start:stop].detach().double()
        e = expected[:, start:stop].detach().double()
        difference = a - e
        largest = max(
            largest, float(torch.nan_to_num(difference.abs(), nan=math.inf, posinf=math.inf).max())
        )
        errors.append(float(difference.square().sum()))
        sizes.append(float(e.square().sum()))
        dot += float((a * e).sum())
        norm += float(a.square().sum())
    size = sum(sizes)
    both = math.sqrt(norm * size)
    return Figures(
        relative_rms=_ratio(sum(errors), size),
        worst_part=max(map(_ratio, errors, sizes)),
        max_difference=largest,
        cosine=dot / both if both > 0 else float(norm == size),
        size=math.sqrt(size / max(expected.numel(), 1)),
    )


@dataclass(frozen=True)
class Limits:
    """Largest accepted relative RMS errors; cosines are minima.

    `max_difference` is absolute for values of a size up to `USUAL_SIZE`, and in proportion beyond.
    """

    operator: float
    correlated: float
    layer: float
    layer_gradient_cosine: float
    parameter_gradient_cosine: float
    max_difference: float = 0.1
    cosine: float = 0.999


LIMITS = {
    # Rounding the exact output to bf16 gives an error of 1.7e-3. bf16 operands with an fp32 state
    # give 4.5e-3, and twice that for nearly equal keys, up to 1.1e-2 in one part of few tokens. A
    # bf16 state gives 5e-2 for such keys. Honest layers give 7.4e-3 to 8.5e-3, int8 products
    # 1.6e-2.
    torch.bfloat16: Limits(6e-3, 1.5e-2, 1.2e-2, 0.999, 0.98),
    # fp32 arithmetic gives about 1e-6; an error above 1e-4 shows lower precision.
    torch.float32: Limits(1e-4, 1e-4, 1e-4, 0.9999, 0.999),
}


USUAL_SIZE = 0.25
"""Root mean square of an operator's outputs for a new layer. After a burst they are eight times as
large, and so are the errors of bf16: up to 0.103 in one of 59 checks of an honest operator."""

MEASURED = (9, 0)
"""The compute capability of the GPUs on which the layer's limit was measured (H100 and H200)."""
UNMEASURED_LAYER = 2e-2
"""The layer's limit for one's own code on other GPUs, where an honest error may be larger."""


@dataclass
class Checker:
    """Device, dtype and random inputs of the checks, and each check's worst figure by name."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator
    worst: dict[str, Check] = field(default_factory=dict)
    own: bool = False  # whether the code is one's own, for which UNMEASURED_LAYER may hold

    @classmethod
    def draw(cls, device: torch.device, seed: int | None = None, *, own: bool = False) -> Checker:
        """Return an empty checker: bf16 on CUDA, fp32 on a CPU, as in the validator's loop."""
        seed = int.from_bytes(os.urandom(7), "big") if seed is None else seed
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return cls(device, dtype, torch.Generator(device).manual_seed(seed), own=own)

    @property
    def limits(self) -> Limits:
        limits, on_gpu = LIMITS[self.dtype], self.device.type == "cuda"
        if self.own and on_gpu and torch.cuda.get_device_capability(self.device) != MEASURED:
            return replace(limits, layer=UNMEASURED_LAYER)
        return limits

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.worst.values())

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal fp32 values."""
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def seed(self) -> int:
        return self.below(1 << 62)

    def below(self, stop: int) -> int:
        """Return a random integer from 0 to `stop` - 1."""
        return int(torch.randint(stop, (1,), generator=self.generator, device=self.device))

    def bound(
        self, name: str, where: str, value: float, limit: float, *, at_least: bool = False
    ) -> None:
        """Record the figure `value` if it is the worst under this name."""
        finite = math.isfinite(value)
        check = Check(
            name=name,
            where=printable(where),  # it may be a weight's name
            value=value if finite else None,
            limit=limit,
            at_least=at_least,
            passed=finite and (value >= limit if at_least else value <= limit),
        )
        if name not in self.worst or check.worse_than(self.worst[name]):
            self.worst[name] = check

    def compare(
        self, name: str, where: str, actual: Tensor, expected: Tensor, limit: float
    ) -> None:
        """Check all figures of `actual` `[B, T, ...]` against `expected`."""
        same_shape = actual.shape == expected.shape
        self.bound(f"{name}: outputs of another shape", where, int(not same_shape), 0)
        if not same_shape:
            return
        result, limits = figures(actual, expected), self.limits
        self.bound(f"{name}: relative RMS error", where, result.relative_rms, limit)
        self.bound(f"{name}: error of the worst eighth", where, result.worst_part, limit)
        largest = result.max_difference / max(1.0, result.size / USUAL_SIZE)
        self.bound(f"{name}: largest difference", where, largest, limits.max_difference)
        self.bound(f"{name}: cosine", where, result.cosine, limits.cosine, at_least=True)

    def unchanged(self, name: str, where: str, actual: Tensor, expected: Tensor) -> None:
        """Check that no element differs."""
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        self.bound(name, where, int((~same).sum()), 0)
