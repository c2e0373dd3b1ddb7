"""How far a tensor is from its exact value, and how far it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from harness.report import Check

PARTS = 8
"""The token dimension is judged as a whole and in this many parts: errors must not grow."""


@dataclass(frozen=True)
class Figures:
    """Errors of a tensor: relative RMS overall and of its worst part, and more."""

    not_finite: int
    relative_rms: float
    worst_part: float
    max_difference: float
    cosine: float


def _ratio(error: float, size: float) -> float:
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return math.sqrt(error / size)


def figures(actual: Tensor, expected: Tensor) -> Figures:
    """Compare two tensors `[B, T, ...]` of one shape in float64, part by part to save memory.

    Values that are not finite make every error NaN or infinite, which no limit accepts.
    """
    not_finite, largest = 0, 0.0
    errors, sizes, dot, norm = [], [], 0.0, 0.0
    length = actual.shape[1]
    bounds = sorted({length * part // PARTS for part in range(PARTS + 1)})
    for start, stop in pairwise(bounds):
        a = actual[:, start:stop].detach().double()
        e = expected[:, start:stop].detach().double()
        difference = a - e
        not_finite += int((~a.isfinite()).sum())
        largest = max(largest, float(torch.nan_to_num(difference.abs(), nan=math.inf).max()))
        errors.append(float(difference.square().sum()))
        sizes.append(float(e.square().sum()))
        dot += float((a * e).sum())
        norm += float(a.square().sum())
    size = sum(sizes)
    both = math.sqrt(norm * size)
    return Figures(
        not_finite=not_finite,
        relative_rms=_ratio(sum(errors), size),
        worst_part=max(map(_ratio, errors, sizes)),
        max_difference=largest,
        cosine=dot / both if both > 0 else float(norm == size),
    )


@dataclass(frozen=True)
class Limits:
    """Largest errors accepted, relative RMS unless said; cosines are smallest values."""

    operator: float
    correlated: float
    layer: float
    layer_gradient_cosine: float
    parameter_gradient_cosine: float
    max_difference: float = 0.1
    cosine: float = 0.999


LIMITS = {
    # Rounding the exact output to bf16 costs 1.7e-3; bf16 operands with an fp32 state 4.5e-3, and
    # twice that on nearly equal keys. A bf16 state costs 5e-2 there.
    torch.bfloat16: Limits(6e-3, 1e-2, 2e-2, 0.99, 0.9),
    # fp32 arithmetic stays near 1e-6: anything above 1e-4 computed with less.
    torch.float32: Limits(1e-4, 1e-4, 1e-4, 0.9999, 0.999),
}


@dataclass
class Bench:
    """Where the checks run, their source of inputs, and what they found."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator
    checks: list[Check] = field(default_factory=list)

    @property
    def limits(self) -> Limits:
        return LIMITS[self.dtype]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def below(self, stop: int) -> int:
        shape = (1,)
        return int(torch.randint(stop, shape, generator=self.generator, device=self.device))

    def bound(self, name: str, value: float, limit: float, *, at_least: bool = False) -> None:
        finite = abs(value) < float("inf")  # false for NaN
        passed = finite and (value >= limit if at_least else value <= limit)
        self.checks.append(
            Check(
                name=name,
                value=value if finite else None,
                limit=limit,
                at_least=at_least,
                passed=passed,
            )
        )

    def compare(self, name: str, actual: Tensor, expected: Tensor, limit: float) -> None:
        """Bound every figure of `actual` [B, T, ...] against `expected` of the same shape."""
        if actual.shape != expected.shape:
            self.bound(f"{name}: dimensions of another size", 1, 0)
            return
        found = figures(actual, expected)
        self.bound(f"{name}: values not finite", found.not_finite, 0)
        self.bound(f"{name}: relative RMS error", found.relative_rms, limit)
        self.bound(f"{name}: relative RMS error of the worst eighth", found.worst_part, limit)
        self.bound(f"{name}: largest difference", found.max_difference, self.limits.max_difference)
        self.bound(f"{name}: cosine", found.cosine, self.limits.cosine, at_least=True)

    def unchanged(self, name: str, actual: Tensor, expected: Tensor) -> None:
        """Bound the number of elements whose bits differ by zero."""
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        self.bound(name, int((~same).sum()), 0)
