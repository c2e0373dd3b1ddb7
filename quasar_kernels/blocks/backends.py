"""The choice of an operator's implementation: kernels of this project or a library, or torch.

If a faster implementation exists but is missing or fails, a log line names the cause and the
remedy, once per cause.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from fla.ops.quasar.switches import BACKEND, requested_backend
from torch import Tensor

_log = logging.getLogger(__name__)


class Backend(NamedTuple):
    """The implementation that computes an operator, and the reason why no faster one does."""

    name: str
    reason: str  # a clause
    remedy: str = ""  # enables a faster one, if known


class Kernels(NamedTuple):
    """One implementation of an operator: this project's or a library's."""

    name: str
    module: str  # the module that must be importable
    remedy: str  # how to make it importable
    call: Callable[..., tuple[Tensor, Tensor]]  # imports the module
    packed: bool = True  # whether it supports packed sequences
    widest: int = 0  # the largest supported number of key channels of a head; 0 is any number
    widths: tuple[int, ...] = ()  # if not empty, the only supported widths of keys and values
    tokens: range | None = None  # lengths for which `auto` may choose it; None is any
    tuned: bool = False  # whether its first call tunes its kernels, so that `auto` never chooses it


def imported(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that imports `module` and calls its function `name`."""

    def call(*arguments: Any) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = getattr(importlib.import_module(module), name)(*arguments)
        return results

    return call


class Operator:
    """An operator with its implementations: kernels in the order of choice, and torch.

    QUASAR_<name>_BACKEND selects one implementation. QUASAR_BACKEND takes precedence: `torch` uses
    torch, and `triton` excludes the kernels named `cuda`.
    """

    def __init__(
        self, name: str, kernels: Sequence[Kernels], in_torch: Callable[..., tuple[Tensor, Tensor]]
    ) -> None:
        self.name = name
        self.variable = f"QUASAR_{name}_BACKEND"
        self._kernels, self._in_torch = kernels, in_torch
        self._failed: dict[str, str] = {}
        self._logged: set[str] = set()

    def backend(
        self,
        device: torch.device,
        dtype: torch.dtype,
        packed: bool = False,
        width: int = 0,
        values: int = 0,
        tokens: int | None = None,
    ) -> Backend:
        """Return the implementation for a call on tensors of this device and dtype, and the reason.

        `width` and `values` are the numbers of channels of a head's keys and values; values of 0
        means as many as keys. `tokens` is the length of the call; None means a long call.

        Raises:
            ValueError: QUASAR_BACKEND or the operator's own variable has no known value.
        """
        requested = self._requested()
        if requested_backend() == "torch":
            return Backend("torch", f"{BACKEND}=torch")
        if requested == "torch":
            return Backend("torch", f"{self.variable}=torch")
        if device.type != "cuda":
            return Backend("torch", "the tensors are not on a GPU")
        if dtype == torch.float64:
            return Backend("torch", "the kernels have no fp64")
        problems: list[str] = []
        remedies: list[str] = []
        for kernels in self._kernels:
            if requested not in ("auto", kernels.name):
                continue
            if requested == "auto" and kernels.tuned:
                remedies.append(f"set {self.variable}={kernels.name}; its first call tunes it")
                continue
            problem, remedy = self._problem(kernels, packed, width, values or width)
            fit = kernels.tokens
            if requested == "auto" and problem is None and fit and tokens not in fit:
                problem = f"{kernels.name} is for calls of {fit[0]} to {fit[-1]} tokens"
                remedy = ""
            if problem is None:
                reason = "; ".join(problems) or "its kernels support this call"
                return Backend(kernels.name, reason, "; or ".join(filter(None, remedies)))
            problems.append(problem)
            remedies.append(remedy)
        return Backend("torch", "; ".join(problems), "; or ".join(filter(None, remedies)))

    def __call__(
        self, like: Tensor, packed: bool, *arguments: Any, **sizes: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute by the first implementation that supports the call.

        `like` has the call's device and dtype; `sizes` are those of `backend`. Kernels that fail
        are not used again, unless torch fails too: then the call is invalid, and the kernels stay
        in use. Calls without tokens launch nothing.
        """
        if not like.numel():
            return self._in_torch(*arguments)
        before = dict(self._failed)
        try:
            return self._first(like, packed, arguments, sizes)
        except Exception:
            self._failed = before
            raise

    def _first(
        self, like: Tensor, packed: bool, arguments: tuple[Any, ...], sizes: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        while True:
            chosen = self.backend(like.device, like.dtype, packed, **sizes)
            kernels = next((k for k in self._kernels if k.name == chosen.name), None)
            if kernels is None:
                self._log_choice(chosen)
                return self._in_torch(*arguments)
            try:
                results = kernels.call(*arguments)
                self._log_choice(chosen)
                return results
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler or a launch failed; try the next kernels
                line = (str(error).strip().splitlines() or [""])[0]
                self._failed[kernels.name] = f"{kernels.name} failed: {type(error).__name__} {line}"

    def named(self, name: str) -> Kernels:
        """Return the kernels with this name.

        Raises:
            KeyError: no kernels have it.
        """
        return {kernels.name: kernels for kernels in self._kernels}[name]

    def _requested(self) -> str:
        requested = os.environ.get(self.variable, "auto")
        allowed = ["auto", *(kernels.name for kernels in self._kernels), "torch"]
        if requested not in allowed:
            raise ValueError(
                f"{self.variable} is {requested!r}; set it to one of {', '.join(allowed)}"
            )
        return requested

    def _problem(
        self, kernels: Kernels, packed: bool, width: int, values: int
    ) -> tuple[str | None, str]:
        if kernels.name == "cuda" and requested_backend() == "triton":
            return f"{BACKEND}=triton", ""
        if kernels.name in self._failed:
            retry = f"fix the cause and restart, or set {BACKEND}=torch"
            return self._failed[kernels.name], retry
        if packed and not kernels.packed:
            return f"{kernels.name} does not support packed sequences here", ""
        if kernels.widths and not {width, values} <= {0, *kernels.widths}:
            *some, last = map(str, kernels.widths)
            return f"{kernels.name} supports heads of {', '.join(some)} or {last} channels", ""
        if kernels.widest and width > kernels.widest:
            return f"{kernels.name} supports heads of up to {kernels.widest} channels", ""
        missing = _missing(kernels.module)
        return (f"{kernels.name}: {missing}" if missing else None), kernels.remedy

    def _log_choice(self, chosen: Backend) -> None:
        where = "in torch" if chosen.name == "torch" else f"on {chosen.name}"
        line = f"{where}: {chosen.reason}; {chosen.remedy}"
        if chosen.remedy and line not in self._logged:
            self._logged.add(line)
            _log.warning("%s runs %s", self.name, line)


@cache
def _missing(module: str) -> str:
    """Return why a module cannot be imported, or an empty string."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a library built for another torch raises any type
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
