"""Checks of the arguments of operators, the layer and blocks."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Supported dtypes."""
PLAIN = {Tensor, torch.nn.Parameter}
"""Types of tensors with memory of their own; `refuse_wrapper` checks all others."""
_BOUNDS = (torch.int32, torch.int64)
_MEANT = {
    "head_first": "the inputs' layout is [B, T, H, ...]",
    "offsets": "did you mean cu_seqlens?",
    "cu_seq_lens_q": "did you mean cu_seqlens?",
    "seq_idx": "did you mean cu_seqlens?",
    "mask": "did you mean attention_mask?",
    "padding_mask": "did you mean attention_mask?",
    "cache_params": "did you mean past_key_values?",
    "past_key_value": "did you mean past_key_values?",
}
"""Other libraries' names of arguments."""

IGNORED_BY_LAYERS = (
    "position_ids",
    "cache_position",
    "num_items_in_batch",
    "logits_to_keep",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
)
"""Arguments that models and trainers pass to every layer. They do not change a layer's result: the
layers compute no positions, and the other arguments concern a model's outputs."""


def refuse_unknown(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    known: Collection[str] = (),
    only: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Check the keyword arguments that a function takes without a parameter of their name.

    Otherwise a misspelt argument would be ignored: packed sequences, for example, would be computed
    as one. Any argument that is None is accepted.

    Args:
        function: for the error.
        options: the function's `**kwargs`.
        known: names that are accepted with any value.
        only: names that are accepted with these values, which change nothing.

    Raises:
        ValueError: names the unknown arguments and the ones probably meant.
    """
    only = only or {}
    unknown = [
        name
        for name, value in options.items()
        if value is not None and name not in known and value not in only.get(name, ())
    ]
    if not unknown:
        return
    names = [
        x.name for x in inspect.signature(function).parameters.values() if x.kind != x.VAR_KEYWORD
    ]
    words = []
    for name in unknown:
        close = difflib.get_close_matches(name, [*names, *known], 1, cutoff=0.7)
        hint = f"did you mean {close[0]}?" if close else "omit it"
        hint = f"only {only[name][0]!r} is supported" if name in only else hint
        words.append(f"{name} ({_MEANT.get(name, hint)})")
    raise ValueError(f"{function.__qualname__} has no argument {', '.join(words)}")


def expect(
    name: str, x: Tensor, shape: Sequence[int | str], device: torch.device | None = None
) -> None:
    """Check a tensor.

    Args:
        name: the argument's name in the error.
        shape: the required shape; a name means any size.
        device: the required device; None means any.

    Raises:
        ValueError: x is not a plain tensor, or has another shape, dtype or device.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{_requirement(name, shape)}; got {type(x).__name__}, not a tensor")
    if type(x) not in PLAIN:
        refuse_wrapper(name, x)
    # whole shapes are compared at once, because these checks delay each decoded token
    sizes = x.shape
    if sizes != shape and not _fits(sizes, shape):
        raise ValueError(f"{_requirement(name, shape)}; got {list(sizes)}")
    expect_dtype(name, x)
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device}, like the other arguments; got {x.device}")


def refuse_wrapper(name: str, x: Tensor) -> None:
    """Raise ValueError if x is a DTensor or a nested tensor, which have no memory for kernels."""
    if hasattr(x, "placements"):
        raise ValueError(f"{name} is a {type(x).__name__}: pass its full_tensor() or to_local()")
    if x.is_nested:
        raise ValueError(f"{name} is a nested tensor: pack it into one row, and pass cu_seqlens")


def expect_dtype(name: str, x: Tensor) -> None:
    """Raise ValueError unless x has one of the supported dtypes."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be bf16, fp16, fp32 or fp64; got {x.dtype}")


def _fits(sizes: Sequence[int], shape: Sequence[int | str]) -> bool:
    for size, wanted in zip(sizes, shape, strict=False):  # all(...) takes twice as long
        if size != wanted and type(wanted) is not str:
            return False
    return len(sizes) == len(shape)


def _requirement(name: str, shape: Sequence[int | str]) -> str:
    return f"{name} must have shape [{', '.join(map(str, shape))}]"


def expect_heads(q: Tensor, v: Tensor) -> None:
    """Raise ValueError if q or v has no heads or channels."""
    if 0 in q.shape[2:] or 0 in v.shape[2:]:
        raise ValueError(
            f"q and v must have heads and channels; got {list(q.shape)} and {list(v.shape)}"
        )


def expect_number(name: str, x: object, otherwise: str = "") -> None:
    """Raise ValueError unless x is a real number; `otherwise` names what else may be passed."""
    if not isinstance(x, Real):
        raise ValueError(f"{name} must be a number{otherwise}; got {x!r}")


def refuse_additive(mask: Tensor) -> None:
    """Raise ValueError for a mask that is meant to be added to scores: 0 for tokens, not 1."""
    if mask.is_floating_point() and bool((mask < 0).any()):
        raise ValueError(
            "attention_mask has negative values, like masks that are added to scores; it must be 0 "
            "for padding and 1 for tokens"
        )


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


def expect_epsilon(name: str, x: float) -> None:
    """Raise ValueError unless x is a finite number and at least 0."""
    expect_number(name, x)
    if not 0 <= x < math.inf:
        raise ValueError(f"{name} must be a finite number from 0; got {x!r}")


def expect_sizes(**sizes: Any) -> None:
    """Raise ValueError unless each size is a whole number and at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise ValueError(f"{name} must be a whole number from 1; got {size!r}")


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
