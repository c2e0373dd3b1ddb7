"""Compares the results and gradients of differentiable calls with float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from quasar_kernels.reference import relative_rms


def with_float64(
    function: Callable[..., Tensor | Sequence[Tensor]],
    oracle: Callable[..., Tensor | Sequence[Tensor]],
    *tensors: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Call `function` on tensors and `oracle` on the same tensors in float64, with backward passes.

    Returns:
        For each call, its results and the gradients of all tensors that are not None.
    """
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    wide = [None if x is None else x.detach().double().requires_grad_() for x in tensors]
    results, exact = _listed(function(*leaves)), _listed(oracle(*wide))
    d_results = [torch.randn_like(x) for x in results]
    torch.autograd.backward(results, d_results)
    torch.autograd.backward(exact, [d.double() for d in d_results])
    return [*results, *_gradients(leaves)], [*exact, *_gradients(wide)]


def _gradients(leaves: Sequence[Tensor | None]) -> list[Tensor]:
    found = []
    for x in leaves:
        if x is not None:
            assert x.grad is not None
            assert x.grad.dtype == x.dtype
            found.append(x.grad)
    return found


def _listed(results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def check(found: Iterable[Tensor], wanted: Iterable[Tensor], limit: float) -> None:
    """Assert that every tensor is within a relative RMS error; a failure shows all errors."""
    errors = [relative_rms(x, y) for x, y in zip(found, wanted, strict=True)]
    assert all(error <= limit for error in errors), [f"{error:.1e}" for error in errors]
