"""A fake of a loaded CUDA program that records the launches of its kernels."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda.program import LoadedProgram, Variant


class Launch(NamedTuple):
    """A launch of a kernel."""

    name: str
    grid: tuple[int, int]
    arguments: Any  # the module's `Arguments`


class LaunchLog:
    """Replaces a module's program and records the launches in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, kernels: list[str]) -> None:
        self.launches: list[Launch] = []
        self.variants: list[Variant] = []
        self._structure, self._kernels = module.Arguments, kernels
        monkeypatch.setattr(module.PROGRAM, "load", self._load)
        monkeypatch.setattr(torch_private, "raw_stream", lambda _: 0)

    def names(self) -> list[str]:
        return [launch.name for launch in self.launches]

    def _load(self, variant: Variant) -> LoadedProgram:
        self.variants.append(variant)
        kernels = {name: self._kernel(name) for name in self._kernels}
        return LoadedProgram(variant, kernels, 132, False)

    def _kernel(self, name: str) -> Any:
        def launch(grid: tuple[int, int], parameters: Any, stream: int) -> None:
            address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
            packed = ctypes.string_at(address, ctypes.sizeof(self._structure))
            self.launches.append(Launch(name, grid, self._structure.from_buffer_copy(packed)))

        return SimpleNamespace(launch=launch, blocks=4, threads=128)
