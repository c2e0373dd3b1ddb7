"""Launch a Triton kernel again without Triton's binding of arguments: less than half the host time.

For short sequences, the host's time limits a call. At each launch Triton binds and inspects every
argument to find the compiled kernel. This module finds it by a short key, the properties on which
Triton specialises.
"""

from __future__ import annotations

import threading
from typing import Any

import torch


def _kind(x: Any) -> Any:
    """Return all of an argument's properties on which Triton may specialise a kernel."""
    if x is None:
        return None
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return x == 1, x % 16 == 0, x.bit_length() > 31
    return type(x)


_hashing = threading.Lock()


class Launcher:
    """Launches one Triton kernel on the current device and its current stream.

    For each key, Triton does the first launch and returns the compiled kernel. Later launches call
    the compiled kernel directly, as in Triton's tutorials. Where this is not possible (in the
    interpreter, with an older Triton), Triton does all launches.

    Args:
        kernel: a `triton.jit` function whose constexprs follow its other arguments.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._compiling = threading.Lock()

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> None:
        """Launch `grid` programs.

        Args:
            arguments: a tensor, then tensors, None, ints and floats, in the kernel's order.
            constants: its constexprs, in order.
            options: of the compilation, such as `num_warps`.
        """
        kinds = tuple(map(_kind, arguments))
        key = (arguments[0].device.index, kinds, constants, *options.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            try:
                compiled[grid](*arguments, *constants)
                return
            except TypeError:  # this Triton does not accept constexprs here; nothing was launched
                self._compiled[key] = None
        with _hashing:  # Triton 3.3 hashes functions that kernels share without a lock
            getattr(self._kernel, "cache_key", None)
        with self._compiling:  # another thread may be compiling it
            launched = self._kernel[grid](*arguments, *constants, **options)
        if key not in self._compiled:
            self._compiled[key] = launched if hasattr(launched, "packed_metadata") else None


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
