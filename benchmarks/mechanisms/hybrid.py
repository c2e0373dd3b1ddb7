"""A hybrid block of three branches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.engine.comparison import Inputs
from benchmarks.engine.mechanism import OURS, Bounds, Calls, Implementation

if TYPE_CHECKING:
    from quasar_kernels.blocks import BlockState

BLOCK_WIDTH, BLOCK_HEADS = 512, 8
PROMPT = 32
"""Tokens of the prompt before the decoded token."""


class States:
    """The states of a block's branches, and those of the same block in float64."""

    def __init__(self, held: BlockState, exact: BlockState) -> None:
        self.held, self._exact = held, exact

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in _tensors(self.held))

    def clone(self) -> States:
        """Return a copy that shares no tensor."""
        return States(copy.deepcopy(self.held), self._exact)

    def double(self) -> States:
        """Return the states for the float64 block."""
        return States(self._exact, self._exact)


def _tensors(x: Any) -> Iterator[Tensor]:
    from fla.layers.quasar import QuasarCache

    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (dict, list, tuple)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _tensors(part)
    elif isinstance(x, QuasarCache):
        yield from _tensors(x.states)


def make(device: str) -> Calls:
    """Return the calls of a block of three branches, 512 channels, fp32 weights, bf16 autocast."""
    from quasar_kernels.blocks import HybridBlock

    torch.manual_seed(0)
    block = HybridBlock(BLOCK_WIDTH, BLOCK_HEADS).to(device)
    precise = copy.deepcopy(block).double()

    def draw(batch: int, tokens: int) -> Inputs:
        return {"x": torch.randn(batch, tokens, BLOCK_WIDTH, device=device)}

    def chunks(x: Inputs, bounds: Bounds | None) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            y: Tensor = block(x["x"], cu_seqlens=bounds and bounds.here)[0]
        return y

    def exact(x: Inputs, state: Any, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
        held = None if state is None else state.held
        return precise(x["x"], held, bounds)[0], x["x"]

    @torch.no_grad()
    def behind_a_prompt(batch: int) -> States:
        prompt = draw(batch, PROMPT)["x"]
        with torch.autocast(device, torch.bfloat16):
            held = block(prompt, keep=True)[1]
        return States(held, precise(prompt.double(), keep=True)[1])

    def step(x: Inputs, state: Any) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            y: Tensor = block(x["x"], state.held, keep=True)[0]
        return y

    weights = sum(p.numel() for p in block.parameters() if p.ndim > 1)
    return Calls(
        draw=draw,
        exact=exact,
        chunks=chunks,
        like="x",
        step=step,
        state=behind_a_prompt,
        operations=lambda lengths: 2.0 * weights * sum(lengths),
        parameters=tuple(block.parameters()),
    )


IMPLEMENTATIONS = {"block": Implementation("hybrid block", OURS, make)}
