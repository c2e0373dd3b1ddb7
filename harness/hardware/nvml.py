"""NVML, NVIDIA's interface to the driver, without torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def opened() -> Iterator[Any]:
    """Yield the module pynvml, or None if it or the driver is missing.

    An NVMLError ends the `with` block without an exception.
    """
    nvml: Any = None
    with suppress(ImportError):
        nvml = importlib.import_module("pynvml")  # it ships no types
    try:
        if nvml is not None:
            nvml.nvmlInit()
    except nvml.NVMLError:
        nvml = None
    if nvml is None:
        yield None
        return
    try:
        with suppress(nvml.NVMLError):
            yield nvml
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
