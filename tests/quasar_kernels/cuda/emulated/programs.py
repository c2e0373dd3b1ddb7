"""CUDA kernels on a CPU, built from their sources and launched by their host code.

This is the code for GPUs without `wgmma`. PTX instructions are replaced by functions of this
folder's headers (ptx.py); all other code is compiled unchanged.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fla.ops.quasar.cuda.driver import Kernel
from fla.ops.quasar.cuda.nvrtc import read_sources
from fla.ops.quasar.cuda.program import DTYPES, CudaProgram, LoadedProgram, Variant

from benchmarks.resources import cache
from tests import processes
from tests.quasar_kernels.cuda.emulated.ptx import on_cpu

EMULATED = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.usefixtures("emulated"),
]
"""Marks of tests that run emulated kernels."""
_HERE = Path(__file__).parent
BLOCKS, MULTIPROCESSORS = 4, 132
"""Reported resident blocks of a multiprocessor, and multiprocessors; in fact one block runs."""
LATE = 1
"""The device on which copies arrive as late as possible and the last warp runs first. On device 0
copies arrive immediately and the first warp runs first."""


class EmulatedKernel(Kernel):
    """A kernel that runs during its launch; `function` belongs to the compiled library."""

    def launch(self, grid: tuple[int, int], parameters: bytes | ctypes.Array[Any]) -> None:
        """Run `grid` blocks one after the other."""
        if isinstance(parameters, bytes):
            parameters = (ctypes.c_char_p * 1)(parameters)
        run, kernel = self.function
        block = self.threads, self.shared, self.device == LATE
        problem = run(kernel, parameters, len(parameters), *grid, *block)
        if problem:
            raise RuntimeError(problem.decode())


@functools.cache
def _compiler() -> str:
    return platform.machine() + processes.run("g++", "--version", check=True).stdout


class Programs:
    """Programs for a CPU, each built once in some seconds and stored in the user's cache folder."""

    def __init__(self) -> None:
        self._built: dict[tuple[object, ...], ctypes.CDLL] = {}

    def load(
        self,
        program: CudaProgram,
        dtype: torch.dtype,
        options: tuple[str, ...] = (),
        late: bool = False,
    ) -> LoadedProgram:
        """Return the loaded program, for device `LATE` or 0."""
        key = (program.name, dtype, options)
        if key not in self._built:
            self._built[key] = self._build(program, dtype, options)
        library, kernels = self._built[key], {}
        for name, structure in program._arguments.items():
            table = f"quasar_{name.removesuffix('_{}')}_launch"
            threads, shared, arguments = (ctypes.c_int * 3).in_dll(library, table)
            assert arguments == ctypes.sizeof(structure), table
            kernel = ctypes.cast(library[f"quasar_{name}".format(DTYPES[dtype])], ctypes.c_void_p)
            function = library.launch_on_cpu, kernel
            kernels[name.removesuffix("_{}")] = EmulatedKernel(
                function, threads, shared, BLOCKS, LATE if late else 0, arguments
            )
        variant = Variant(LATE if late else 0, dtype, options)
        return LoadedProgram(variant, kernels, MULTIPROCESSORS, on_hopper=False)

    def _build(
        self, program: CudaProgram, dtype: torch.dtype, options: tuple[str, ...]
    ) -> ctypes.CDLL:
        files = {name: on_cpu(text) for name, text in read_sources(program._sources).items()}
        files |= {path.name: path.read_text() for path in _HERE.glob("*.h")}
        included = ["numbers.h", "memory.h", *(path.name for path in program._sources)]
        files["all.cpp"] = "".join(f'#include "{name}"\n' for name in included)
        flags = "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"
        command = ["g++", *flags, f"-DQUASAR_ONLY_{DTYPES[dtype].upper()}", *options]

        def make(library: Path) -> None:
            for name, text in files.items():
                (library.parent / name).write_text(text)
            built = processes.run(*command, "-o", library, library.parent / "all.cpp")
            assert built.returncode == 0, built.stderr

        parts = [_compiler(), *command, *(part for item in sorted(files.items()) for part in item)]
        library = ctypes.CDLL(str(cache.entry(f"{cache.digest(parts)}.so", make)))
        library.launch_on_cpu.restype = ctypes.c_char_p
        return library
