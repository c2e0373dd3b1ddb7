"""What computes an operator: a library's kernels where they serve, else torch, and why.

Nothing falls back silently: where a GPU's call goes to torch although kernels exist for it, or a
kernel fails, one line in the log names the cause and the remedy, once for each cause.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from fla.ops.quasar.switches import BACKEND, requested_backend
from torch import Tensor

_log = logging.getLogger(__name__)


class Backend(NamedTuple):
    """What computes an operator, and why it and nothing faster."""

    name: str
    reason: str  # a clause
    remedy: str = ""  # what would make something faster serve, where that is known


class Kernels(NamedTuple):
    """One library's implementation of an operator."""

    name: str
    module: str  # what must be importable
    remedy: str  # what to do where it is not
    call: Callable[..., tuple[Tensor, Tensor]]  # imports the module
    packed: bool = True  # whether it takes packed sequences


class Operator:
    """An operator with its implementations: kernels in the order of choice, and torch."""

    def __init__(
        self, name: str, kernels: Sequence[Kernels], in_torch: Callable[..., tuple[Tensor, Tensor]]
    ) -> None:
        self.name = name
        self._kernels, self._in_torch = kernels, in_torch
        self._failed: dict[str, str] = {}
        self._told: set[str] = set()

    def backend(self, device: torch.device, dtype: torch.dtype, packed: bool = False) -> Backend:
        """Return what computes a call on tensors of this device and dtype, and why.

        Raises:
            ValueError: QUASAR_BACKEND has no known value.
        """
        if requested_backend() == "torch":
            return Backend("torch", f"{BACKEND}=torch")
        if device.type != "cuda":
            return Backend("torch", "the tensors are not on a GPU")
        if dtype == torch.float64:
            return Backend("torch", "the kernels have no fp64")
        problems: list[str] = []
        remedies: list[str] = []
        for kernels in self._kernels:
            problem, remedy = self._problem(kernels, packed)
            if problem is None:
                return Backend(kernels.name, "; ".join(problems) or "its kernels take this call")
            problems.append(problem)
            remedies.append(remedy)
        return Backend("torch", "; ".join(problems), "; or ".join(filter(None, remedies)))

    def __call__(self, like: Tensor, packed: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Compute by the first implementation that serves; `like` is on the call's device.

        A kernel that fails is not tried again. Calls without tokens launch nothing.
        """
        if not like.numel():
            return self._in_torch(*arguments)
        while True:
            chosen = self.backend(like.device, like.dtype, packed)
            kernels = next((k for k in self._kernels if k.name == chosen.name), None)
            if kernels is None:
                if chosen.remedy:
                    self._tell(chosen.reason, chosen.remedy)
                return self._in_torch(*arguments)
            try:
                return kernels.call(*arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler's, a launch's: whatever it is, torch serves
                line = (str(error).strip().splitlines() or [""])[0]
                self._failed[kernels.name] = f"{kernels.name} failed: {type(error).__name__} {line}"

    def _problem(self, kernels: Kernels, packed: bool) -> tuple[str | None, str]:
        if kernels.name in self._failed:
            retry = f"mend what it names and start again, or set {BACKEND}=torch"
            return self._failed[kernels.name], retry
        if packed and not kernels.packed:
            return f"{kernels.name} takes no packed sequences here", ""
        missing = _missing(kernels.module)
        return (f"{kernels.name}: {missing}" if missing else None), kernels.remedy

    def _tell(self, reason: str, remedy: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("%s runs in torch: %s; %s", self.name, reason, remedy)


@cache
def _missing(module: str) -> str:
    """Return why a module cannot be imported, or an empty string."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a library built for another torch raises what it likes
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
