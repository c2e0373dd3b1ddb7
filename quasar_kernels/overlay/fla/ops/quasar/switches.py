"""The environment variables of the kernels: all of them by name, and their readings."""

from __future__ import annotations

import os
from typing import Literal, get_args

Backend = Literal["auto", "cuda", "triton", "torch"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

BACKEND = "QUASAR_BACKEND"
"""Which implementation takes a call: one of `BACKENDS`."""
GRAPHS = "QUASAR_GRAPHS"
"""0 keeps every call of the layer from becoming a CUDA graph."""
KEEP_MIB = "QUASAR_KEEP_MIB"
"""How much a recorded call of the layer may keep for its backward pass: a whole number of MiB."""
AUTOTUNE = "QUASAR_AUTOTUNE"
"""0 keeps an unknown GPU from being tuned."""
CACHE_DIR = "QUASAR_CACHE_DIR"
"""The folder of compiled kernels and tiles instead of ~/.cache/quasar."""
NVRTC = "QUASAR_NVRTC"
"""The path of the NVRTC library to use instead of searching for one."""


def requested_backend() -> Backend:
    """Return QUASAR_BACKEND, `auto` where it is not set.

    Raises:
        ValueError: it is none of `BACKENDS`.
    """
    wanted = os.environ.get(BACKEND, "auto")
    for name in BACKENDS:
        if name == wanted:
            return name
    raise ValueError(f"{BACKEND} is {wanted!r}; set it to one of {', '.join(BACKENDS)}")
