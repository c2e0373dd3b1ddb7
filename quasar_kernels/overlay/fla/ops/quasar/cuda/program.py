"""A program in CUDA C++: compiled and loaded once for each variant, disabled after a failure."""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fla.ops.quasar.cuda.driver import Kernel, load_kernels
from fla.ops.quasar.cuda.nvrtc import HOPPER, CudaUnavailableError, compile_files, load_library
from fla.ops.quasar.switches import Backend

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Names of the dtypes that the CUDA kernels support."""
CAPABILITY = (8, 0)
"""The oldest supported compute capability."""

_log = logging.getLogger("fla.ops.quasar")


class Variant(NamedTuple):
    """The device, dtype and options for which a program is compiled and loaded."""

    device: int
    dtype: torch.dtype  # one of DTYPES
    options: tuple[str, ...] = ()  # NVRTC's


class LoadedProgram(NamedTuple):
    """A program's kernels on a device."""

    variant: Variant
    kernels: Mapping[str, Kernel]  # by name, without `quasar_` and the dtype
    multiprocessors: int
    on_hopper: bool  # kernels copy by tensor maps (TMA)


class CudaProgram:
    """Sources that are compiled together, and their loaded variants; thread-safe.

    Args:
        name: the program's name in the names of cached files and in messages.
        sources: its .cu files.
        arguments: the structure of each kernel's first parameter, by the kernel's name without
            `quasar_` and with {} for the dtype, if it has one.
        warning: the one-line log message at the first failure, with %s for the error.
        parallel: whether each source is compiled by itself, in parallel. For some programs this
            changes the machine code.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[Path],
        arguments: Mapping[str, type],
        warning: str,
        *,
        parallel: bool = False,
    ) -> None:
        self.name, self._sources, self._arguments = name, sources, arguments
        self._warning, self._parallel = warning, parallel
        self._lock = threading.Lock()
        self._entries: dict[Variant, LoadedProgram | CudaUnavailableError] = {}
        self._preparing: set[Variant] = set()

    def compile(
        self, capability: tuple[int, int], dtype: str, options: Sequence[str] = ()
    ) -> list[bytes]:
        """Return the machine code for a GPU's capability and the dtype `bf16` or `fp16`, in parts.

        Raises:
            CudaUnavailableError: the GPU is too old, NVRTC or a source is missing, or the
                compilation fails.
        """
        if capability < CAPABILITY:
            raise CudaUnavailableError(
                "the GPU has compute capability {}.{}; the CUDA kernels need {}.{}".format(
                    *capability, *CAPABILITY
                ),
                "set QUASAR_BACKEND=triton to stop trying",
            )
        options = (f"-DQUASAR_ONLY_{dtype.upper()}", *options)
        name = f"{self.name}-{dtype}"
        if not self._parallel:
            return [compile_files(name, self._sources, capability, options)]
        load_library()  # once, not in each thread
        with ThreadPoolExecutor(len(self._sources)) as threads:
            parts = [
                threads.submit(compile_files, f"{name}-{x.stem}", [x], capability, options)
                for x in self._sources
            ]
            return [part.result() for part in parts]

    def find(self, variant: Variant) -> LoadedProgram | CudaUnavailableError:
        """Return the program, compiled and loaded at first use, or the error that prevents it."""
        entry = self._entries.get(variant)
        if entry is None:
            if torch.cuda.is_current_stream_capturing():  # loading would break the capture
                return CudaUnavailableError(
                    "a CUDA graph is captured before the kernels were loaded",
                    "make one call before the capture",
                )
            with self._lock:
                if variant not in self._entries:
                    try:
                        self._entries[variant] = self._load(variant)
                    except CudaUnavailableError as error:
                        self.give_up(variant, error)
            entry = self._entries[variant]
        return entry

    def prepare(self, variant: Variant) -> None:
        """Start to compile and load the program in the background, if it is not loaded yet.

        A later `find` waits for it. A process that ends does not.
        """
        if variant in self._entries or variant in self._preparing:
            return
        if not torch.cuda.is_current_stream_capturing():
            self._preparing.add(variant)
            threading.Thread(target=self.find, args=(variant,), daemon=True).start()

    def find_loaded(self, variant: Variant) -> LoadedProgram | None:
        """Return the program as `find` does, or None if it cannot be used."""
        entry = self._entries.get(variant) or self.find(variant)
        return entry if isinstance(entry, LoadedProgram) else None

    def load(self, variant: Variant) -> LoadedProgram:
        """Return the program as `find` does.

        Raises:
            CudaUnavailableError: the program cannot be used.
        """
        entry = self.find(variant)
        if isinstance(entry, CudaUnavailableError):
            raise CudaUnavailableError(entry.problem, entry.remedy)
        return entry

    def give_up(self, variant: Variant, error: CudaUnavailableError) -> None:
        """Disable a variant after a failure; log only the program's first failure."""
        if not any(isinstance(entry, CudaUnavailableError) for entry in self._entries.values()):
            _log.warning(self._warning, error)
        self._entries[variant] = CudaUnavailableError(error.problem, error.remedy)

    def failed(self, backend: Backend, variant: Variant, error: CudaUnavailableError) -> None:
        """Disable a variant after a failed launch.

        Raises:
            CudaUnavailableError: `backend`, QUASAR_BACKEND's value, is `cuda`.
        """
        if backend == "cuda":
            raise error
        self.give_up(variant, error)

    def _load(self, variant: Variant) -> LoadedProgram:
        device, dtype, options = variant
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        parts = self.compile(capability, DTYPES[dtype], options)
        names = {name: f"quasar_{name}".format(DTYPES[dtype]) for name in self._arguments}
        loaded = load_kernels(parts, names.values(), device)
        for name, structure in self._arguments.items():
            expected, actual = loaded[names[name]].arguments, ctypes.sizeof(structure)
            if expected != actual:
                raise CudaUnavailableError(
                    f"{names[name]} takes {expected} bytes of arguments, but the host passes "
                    f"{actual}",
                    "publish the overlay again: its files are of two versions",
                )
        kernels = {name.removesuffix("_{}"): loaded[full] for name, full in names.items()}
        processors = properties.multi_processor_count
        return LoadedProgram(variant, kernels, processors, capability == HOPPER)


POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Return fields of type `kind` for a `ctypes.Structure`; spaces separate the names."""
    return [(name, kind) for name in names.split()]


def serializer(structure: type[ctypes.Structure]) -> Callable[..., bytes]:
    """Return a function from a structure's values to its bytes.

    The function takes an array's elements as separate arguments. It needs a third of the time that
    filling the structure needs.
    """
    kinds: list[Any] = [field[1] for field in structure._fields_]
    codes = "".join(
        kind._type_._type_ * kind._length_ if issubclass(kind, ctypes.Array) else kind._type_
        for kind in kinds
    )
    padding = ctypes.sizeof(structure) - struct.calcsize(codes)
    return struct.Struct(f"{codes}{padding}x").pack


def addresses(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Return the tensors' addresses, 0 for None."""
    found = []  # faster than a generator
    for x in tensors:
        found.append(0 if x is None else x.data_ptr())
    return tuple(found)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
