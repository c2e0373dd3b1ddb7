"""Checks of the arguments of blocks and operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Supported dtypes."""
_BOUNDS = (torch.int32, torch.int64)


def expect(
    name: str, x: Tensor, shape: Sequence[int | str], device: torch.device | None = None
) -> None:
    """Check a tensor.

    Args:
        name: the argument's name in the error.
        shape: the required shape; a name means any size.
        device: the required device; None means any.

    Raises:
        ValueError: x is not a tensor, or has another shape, dtype or device.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{_requirement(name, shape)}; got {type(x).__name__}, not a tensor")
    # whole shapes are compared at once, because these checks delay each decoded token
    if x.shape != shape and (
        len(x.shape) != len(shape)
        or any(
            wanted != size and not isinstance(wanted, str)
            for wanted, size in zip(shape, x.shape, strict=True)
        )
    ):
        raise ValueError(f"{_requirement(name, shape)}; got {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be bf16, fp16, fp32 or fp64; got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device}, like the other arguments; got {x.device}")


def _requirement(name: str, shape: Sequence[int | str]) -> str:
    return f"{name} must have shape [{', '.join(map(str, shape))}]"


def check_bounds(cu_seqlens: Tensor | None, batch: int, name: str = "cu_seqlens") -> None:
    """Raise ValueError unless dtype and shape are those of bounds; the values are not read."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(
            f"{name} must be an int32 or int64 tensor [N + 1]; got {type(cu_seqlens).__name__}"
        )
    if cu_seqlens.dtype not in _BOUNDS:
        raise ValueError(f"{name} must be an int32 or int64 tensor; got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or not cu_seqlens.numel():
        shape = list(cu_seqlens.shape)
        raise ValueError(f"{name} must have shape [N + 1], from 0 to T; got {shape}")
    if cu_seqlens.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values: use another device")
    if batch != 1:
        raise ValueError(
            f"{name} packs sequences into one row, so B must be 1; got B = {batch}: flatten them"
        )


def check_state(
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    batch: int,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Raise ValueError unless the states have this shape, and one exists for each sequence."""
    check_bounds(cu_seqlens, batch)
    if initial_state is not None:
        sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        name = "initial_state, one state per sequence,"
        expect(name, initial_state, (sequences, *shape), device)


def expect_sizes(**sizes: int) -> None:
    """Raise ValueError unless each size is a whole number and at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a whole number from 1; got {size!r}")
