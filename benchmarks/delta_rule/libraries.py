"""Other libraries' gated delta rule, for heads of 128 alone: how each is called, and what it takes.

FlashQLA (flash-qla 0.1, compiled by TileLang) has the host library's arguments. FlashInfer
(flashinfer-python 0.7, compiled by the CuTe DSL) takes sequences packed in one row with their
bounds, and decays where the others take their logarithms; it has no backward pass. Both run on
Hopper and newer GPUs. cuLA is not among them: no package index has a distribution of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module, metadata
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.delta_rule.results import Rule, Way
from benchmarks.operator.training_results import Shape

WIDTH = 128
"""Of the heads that they take."""

Function = Callable[..., tuple[Tensor, Tensor | None]]


class Library(NamedTuple):
    """A library that is measured where it is installed."""

    distribution: str  # what pip installs
    make: Callable[[], Function]  # imports it and gives its function the host library's arguments
    backward: bool


def _flashqla() -> Function:
    function: Function = import_module("flash_qla").chunk_gated_delta_rule
    return function


def _flashinfer() -> Function:
    function = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule

    @cache
    def bounds(batch: int, tokens: int, device: torch.device) -> Tensor:
        return torch.arange(batch + 1, device=device) * tokens

    def packed(q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, g: Tensor) -> tuple[Tensor, None]:
        batch, tokens = v.shape[:2]
        rows = (t.flatten(0, 1) for t in (q, k, v, g.exp(), beta))
        # without max_seqlen all tokens are taken for one sequence's
        ends = bounds(batch, tokens, v.device)
        o: Tensor = function(*rows, cu_seqlens=ends, max_seqlen=tokens)
        return o.view_as(v), None

    return packed


LIBRARIES = {
    "flashqla": Library("flash-qla", _flashqla, backward=True),
    "flashinfer": Library("flashinfer-python", _flashinfer, backward=False),
}


def takes(name: str, rule: Rule, way: Way, shape: Shape) -> bool:
    """Tell whether a library has such a call."""
    gated = rule == "gated delta rule" and shape.width == WIDTH
    return gated and (way == "forward" or LIBRARIES[name].backward)


def versions(names: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Import the libraries among these names.

    Returns:
        the version of each that can be called here, and why the others cannot.
    """
    found, missing = {}, {}
    for name in (name for name in LIBRARIES if name in names):
        try:
            LIBRARIES[name].make()
            found[name] = metadata.version(LIBRARIES[name].distribution)
        except Exception as error:  # FlashQLA's import alone raises three kinds without its GPU
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing
