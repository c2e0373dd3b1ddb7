"""The environment variables of the kernels: their names, and functions that read them."""

from __future__ import annotations

import os
from typing import Literal, get_args

Backend = Literal["auto", "cuda", "triton", "torch"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

BACKEND = "QUASAR_BACKEND"
"""The implementation of calls: one of `BACKENDS`."""
GRAPHS = "QUASAR_GRAPHS"
"""0 disables the CUDA graphs of the layer's calls."""
KEEP_MIB = "QUASAR_KEEP_MIB"
"""Limit in MiB, a whole number, on the saved results of one call of the layer."""
CACHE_DIR = "QUASAR_CACHE_DIR"
"""The folder of compiled kernels instead of ~/.cache/quasar."""
NVRTC = "QUASAR_NVRTC"
"""The path of the NVRTC library to use instead of searching for one."""


def _read(name: str, default: str) -> str:
    """Return a variable's value, or `default` if it is not set.

    For a variable that is not set, `os.environ.get` raises and catches two exceptions. They take a
    thirtieth of the host's time in a short call of the layer, so this function avoids them.
    """
    stored = getattr(os.environ, "_data", None)
    if stored is not None and os.environ.encodekey(name) not in stored:
        return default
    return os.environ.get(name, default)


def requested_backend() -> Backend:
    """Return QUASAR_BACKEND, `auto` if it is not set.

    Raises:
        ValueError: the value is not in `BACKENDS`.
    """
    value = _read(BACKEND, "auto")
    for name in BACKENDS:
        if name == value:
            return name
    raise ValueError(f"{BACKEND} is {value!r}; set it to one of {', '.join(BACKENDS)}")


def graphs() -> bool:
    """Return whether calls of the layer may become CUDA graphs."""
    return _read(GRAPHS, "") != "0"


def keep_mib(default: int) -> int:
    """Return QUASAR_KEEP_MIB, `default` if it is not set.

    Raises:
        ValueError: the value is not a whole number.
    """
    limit = _read(KEEP_MIB, "")
    if limit and not limit.isdecimal():
        raise ValueError(f"{KEEP_MIB} is {limit!r}; set it to a whole number of MiB, 0 for nothing")
    return int(limit or default)


def cache_dirs() -> tuple[str, str]:
    """Return QUASAR_CACHE_DIR and the user's XDG_CACHE_HOME, "" for unset ones."""
    return os.environ.get(CACHE_DIR, ""), os.environ.get("XDG_CACHE_HOME", "")


def nvrtc_library() -> str | None:
    """Return QUASAR_NVRTC, None if it is not set."""
    return os.environ.get(NVRTC)


def cuda_toolkits() -> list[str]:
    """Return the folders of CUDA toolkits that the environment names, in order of preference."""
    named = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    return [folder for folder in named if folder]


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
