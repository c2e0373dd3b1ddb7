"""The gated delta rule of other libraries, for heads of 128, with fla's arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Library(NamedTuple):
    """Another library, and an adapter of its function to fla's arguments."""

    distribution: str  # its name for pip
    make: Callable[[], Callable[..., tuple[Tensor, Any]]]  # imports it
    backward: bool


def _flashqla() -> Callable[..., tuple[Tensor, Any]]:
    function: Callable[..., tuple[Tensor, Any]]
    function = import_module("flash_qla").chunk_gated_delta_rule
    return function


def _flashinfer() -> Callable[..., tuple[Tensor, Any]]:
    function = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule

    @cache
    def bounds(batch: int, tokens: int, device: torch.device) -> Tensor:
        return torch.arange(batch + 1, device=device) * tokens

    def packed(q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, g: Tensor) -> tuple[Tensor, None]:
        batch, tokens = v.shape[:2]
        rows = (t.flatten(0, 1) for t in (q, k, v, g.exp(), beta))  # decays, not their logarithms
        # without max_seqlen the function treats all tokens as one sequence
        ends = bounds(batch, tokens, v.device)
        o: Tensor = function(*rows, cu_seqlens=ends, max_seqlen=tokens)
        return o.view_as(v), None

    return packed


LIBRARIES = {
    "flashqla": Library("flash-qla", _flashqla, backward=True),
    "flashinfer": Library("flashinfer-python", _flashinfer, backward=False),
}


def versions() -> tuple[dict[str, str], dict[str, str]]:
    """Import the libraries.

    Returns:
        the versions of usable libraries, and the reasons against the others.
    """
    installed, missing = {}, {}
    for name, library in LIBRARIES.items():
        try:
            library.make()
            installed[name] = metadata.version(library.distribution)
        except Exception as error:  # FlashQLA's import raises three kinds without its GPU
            missing[name] = f"{type(error).__name__}: {error}"
    return installed, missing
