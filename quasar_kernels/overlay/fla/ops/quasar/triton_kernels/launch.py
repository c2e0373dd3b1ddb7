"""Launch Triton kernels with little host time, and compile those of a first call in parallel.

For short sequences, the host's time limits a call. At each launch Triton binds and inspects every
argument to find the compiled kernel. This module finds it by a short key, which consists of the
properties on which Triton specialises.

A first call would compile its kernels one after the other, each before its launch, and those of the
backward pass later. `compile_ahead` runs the launching functions on tensors without memory, so that
threads compile all kernels at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fla.ops.quasar import torch_private

MAX_THREADS = 16


_hashing = threading.Lock()


class Launcher:
    """Launches one Triton kernel on the current device and its current stream.

    For each key, Triton does the first launch and returns the compiled kernel. Later launches call
    the compiled kernel directly, as in Triton's tutorials. Where this is not possible (in the
    interpreter, with an older Triton), Triton does all launches.

    Args:
        kernel: a `triton.jit` function with its constexprs after all other arguments.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._compiling = threading.Lock()
        self._ahead: dict[tuple[Any, ...], Future[None]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...] | Mapping[str, Any],
        **options: int,
    ) -> None:
        """Launch `grid` programs; only start to compile the kernel if the tensors have no memory.

        Args:
            arguments: a tensor, then tensors, None, ints and floats, in the kernel's order.
            constants: its constexprs, in order or by name.
            options: of the compilation, such as `num_warps`.
        """
        if type(constants) is not tuple:
            names = self._kernel.arg_names[len(arguments) :]
            constants = tuple(map(constants.__getitem__, names))
        first = arguments[0]
        device = torch.cuda.current_device() if first.is_meta else first.get_device()
        key = (device, _kinds(arguments), constants, *options.values())
        compiled = self._compiled.get(key)
        if first.is_meta:
            if key not in self._compiled and key not in self._ahead:
                self._hash()
                self._kernel.device_caches[device]  # creates it; threads would create several
                run = functools.partial(self._kernel.warmup, *arguments, *constants, grid=grid)
                self._ahead[key] = _threads().submit(_compile, device, run, grid, options)
            return
        if compiled is not None:
            try:
                stream = torch_private.raw_stream(device)  # Triton's own search takes longer
                compiled[grid](*arguments, *constants, stream=stream)
                return
            except TypeError:  # this Triton does not accept constexprs here; nothing was launched
                self._compiled[key] = None
        if (future := self._ahead.pop(key, None)) is not None:
            future.result()
        self._hash()
        with self._compiling:  # another thread may be compiling it
            launched = self._kernel[grid](*arguments, *constants, **options)
        if key not in self._compiled:
            self._compiled[key] = launched if hasattr(launched, "packed_metadata") else None

    def _hash(self) -> None:
        with _hashing:  # Triton 3.3 has no lock for the hashes of functions that kernels share
            getattr(self._kernel, "cache_key", None)


def padded(n: int, least: int = 1) -> int:
    """Return the next power of two, at least `least`; Triton's own function takes 2 us."""
    return max(least, 1 << (n - 1).bit_length())


def _kinds(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all of the arguments' properties on which Triton may specialise a kernel."""
    kinds: list[Any] = []
    for x in arguments:
        kind = type(x)
        if kind is int:
            kinds.append((x == 1) + 2 * (x % 16 == 0) + 4 * (x.bit_length() > 31))
        elif x is None or kind is float:
            kinds.append(kind)
        else:
            kinds += x.dtype, x.data_ptr() % 16 == 0
    return tuple(kinds)


_known: set[Any] = set()
_starting = threading.Lock()


def compile_ahead(key: Any, launch: Callable[..., Any], *arguments: Any) -> None:
    """Start to compile the kernels that `launch(*arguments)` launches, once for each key.

    `launch` gets copies of the arguments in which tensors have no memory. The current device must
    be that of its later calls. While a CUDA graph is captured, nothing happens.

    Args:
        key: differs for calls that need different kernels.
        launch: launches by a `Launcher` only.
        arguments: tensors and nested tuples of tensors; others are passed on.
    """
    key = (launch, torch.cuda.current_device(), key)
    if key in _known or torch.cuda.is_current_stream_capturing():
        return
    with _starting:
        if key not in _known:
            _known.add(key)
            with torch.no_grad():
                launch(*torch_private.map_tensors(_without_memory, arguments))


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "quasar-compile")


def _compile(
    device: int, warmup: Callable[..., Any], grid: tuple[int, int, int], options: dict[str, int]
) -> None:
    with torch.cuda.device(device), contextlib.suppress(Exception):  # the launch raises it again
        compiled = warmup(**options)
        compiled[grid]  # loads the kernel


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
