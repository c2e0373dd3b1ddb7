"""The current device, autocast's dtype, and what autograd records of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import function

from fla.ops.quasar import torch_private

Function = TypeVar("Function", bound=Callable[..., Any])


def on_its_device(function: Function) -> Function:
    """Make the device of a call's first tensor the current one while the call runs.

    Kernels are launched on the current device, on its current stream. This decorates every public
    function that launches a kernel and every backward pass, so that the functions that they call
    need not set the device. If the device is already current, this costs half a microsecond.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, torch.Tensor):
                if x.is_cuda and x.get_device() != torch.cuda.current_device():
                    with torch.cuda.device(x.device):
                        return function(*args, **kwargs)
                break
        return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def is_recorded(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd records a call with these tensors.

    On a GPU, calls in forward mode count, too. An autograd function then raises an error; without
    one, kernels would return results without derivatives.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return True
    in_forward_mode = torch_private.forward_ad._current_level >= 0
    return in_forward_mode and any(x is not None and x.is_cuda for x in tensors)


def once_differentiable(backward: Function) -> Function:
    """Make second derivatives through a backward pass raise an error.

    torch's decorator of this name does so only if an incoming gradient requires a gradient. That of
    a sum does not, so a gradient penalty would be ignored without an error.
    """
    run = function.once_differentiable(backward)

    @functools.wraps(backward)
    def refused(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():  # torch's decorator would change nothing
            return backward(ctx, *gradients)
        return run(ctx, *(g if g is None else g.detach().requires_grad_() for g in gradients))

    return refused  # type: ignore[return-value]


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's if it is on, otherwise x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
