"""Compiled programs in use: each is loaded once, and given up for good when it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError

Key = TypeVar("Key", bound=Hashable)
Program = TypeVar("Program")

_log = logging.getLogger("fla.ops.quasar")


class Programs(Generic[Key, Program]):
    """Programs, by the key that each is loaded for; threads may share them.

    Args:
        load: compile and load the program of a key; may raise CudaUnavailableError.
        warning: what is logged at the first failure, with %s for the error: one line.
    """

    def __init__(self, load: Callable[[Key], Program], warning: str) -> None:
        self._load, self._warning = load, warning
        self._lock = threading.Lock()
        self._loaded: dict[Key, Program] = {}
        self._failures: dict[Key, str] = {}

    def get(self, key: Key) -> Program | None:
        """Return the program, loaded if it was not yet, or None: `reason_against` knows why."""
        if key not in self._loaded:
            self.reason_against(key)
        return self._loaded.get(key)

    def reason_against(self, key: Key) -> str | None:
        """Return why the program cannot be used, or None once it is loaded."""
        if key in self._loaded:
            return None
        if key not in self._failures:
            if torch.cuda.is_current_stream_capturing():  # loading would break the capture
                return "a CUDA graph is captured before the kernels were loaded; call once before"
            self._try(key)
        return self._failures.get(key)

    def give_up(self, key: Key, error: Exception) -> None:
        """Use the program no more: it failed. The first failure of all is logged."""
        first = not self._failures
        self._failures[key] = str(error)
        self._loaded.pop(key, None)
        if first:
            _log.warning(self._warning, error)

    def _try(self, key: Key) -> None:
        with self._lock:
            if key in self._loaded or key in self._failures:
                return
            try:
                self._loaded[key] = self._load(key)
            except CudaUnavailableError as error:
                self.give_up(key, error)
