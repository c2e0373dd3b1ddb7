"""The private functions of torch that this package calls.

Checked with torch 2.11 (CUDA 13.0, on an H200) and 2.13 (CPU). Look here first when a new torch
fails: its public functions do the same, more slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad  # its _current_level is -1 unless a dual_level is active
from torch.utils import _pytree

copy_all = torch._foreach_copy_
"""`copy_all(targets, sources)` copies many tensors in few launches."""

transforms_active = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func is active."""

_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE

no_autocast = torch._C._DisableAutocast
"""A context without autocast; `torch.autocast(kind, enabled=False)` takes 12 us more on a host."""

map_tensors: Any = functools.partial(_pytree.tree_map_only, torch.Tensor)
"""`map_tensors(function, x)` is x with `function(t)` for each tensor t in nested tuples."""

raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""`raw_stream(device)` is the handle of a device's current stream; None in builds without CUDA."""


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return an autograd function's `apply` that does not search for functorch's wrappers.

    The search through all arguments takes 7 of the 85 us of a short call of the layer.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc] # it exists


def fake_mode() -> Any:
    """Return the active FakeTensorMode, in which tensors have shapes but no values, or None."""
    return _mode(_FAKE)


def recorded() -> Any:
    """Return a context in which autograd records, also within an operator's implementation."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def without_ownership(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the address of `x` that does not own the memory; x if torch cannot."""
    construct = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if construct is None:
        return x
    memory = x.untyped_storage()
    same = construct(memory.data_ptr(), x.device, memory.nbytes())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        same, x.storage_offset(), x.shape, x.stride()
    )


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
