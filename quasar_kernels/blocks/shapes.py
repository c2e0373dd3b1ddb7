"""Checks of what an operator is given; an error names the argument, its shape and the right one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def expect(name: str, x: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless x has the shape."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {list(shape)}; got {list(x.shape)}")


def check_state(
    initial_state: Tensor | None, cu_seqlens: Tensor | None, batch: int, shape: tuple[int, ...]
) -> None:
    """Raise ValueError unless there is one state of a shape for each sequence."""
    if cu_seqlens is not None and batch != 1:
        raise ValueError(
            f"cu_seqlens packs sequences into one row, so B must be 1; got B = {batch}: "
            "flatten them"
        )
    if initial_state is not None:
        sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        expect("initial_state, one state a sequence,", initial_state, (sequences, *shape))
