"""A hybrid block as an implementation, and training steps of the small hybrid model."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.clocks import free
from benchmarks.mechanisms.calls import Bounds, Implementation
from benchmarks.mechanisms.inputs import Inputs
from benchmarks.mechanisms.results import Trained
from quasar_kernels.blocks import HybridBlock
from quasar_kernels.blocks.language.checkpoint import Recipe
from quasar_kernels.blocks.language.model import BYTES, Sizes
from quasar_kernels.blocks.language.training import Training

BLOCK_WIDTH, BLOCK_HEADS = 512, 8

SIZES = Sizes(width=192, heads=3, layers=4, inner=640)
"""Of the model of 3.8 million parameters: heads of 64 channels, and of 128 in Mamba-2."""
RECIPE = Recipe(tokens=511, batch=64)
"""Sequences of 512 tokens: the last is a target alone."""
SMALL = Recipe(tokens=511, batch=4)
"""Enough for every kernel to be compiled."""
TRIAL = Recipe(tokens=31, batch=2)
"""Without a GPU."""
SETTINGS = {
    "everything kept": SIZES,
    "blocks computed again (checkpoint_above=256)": SIZES._replace(checkpoint_above=256),
}
WARM_STEPS, STEPS = 4, 12


def hybrid_block(device: str) -> Implementation:
    """Return the block of all three branches over 512 channels, its weights fp32, autocast bf16."""
    torch.manual_seed(0)
    block = HybridBlock(BLOCK_WIDTH, BLOCK_HEADS).to(device)
    precise = copy.deepcopy(block).double()

    def draw(batch: int, tokens: int) -> Inputs:
        return {"x": torch.randn(batch, tokens, BLOCK_WIDTH, device=device)}

    def chunks(x: Inputs, bounds: Bounds | None) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            y: Tensor = block(x["x"], cu_seqlens=bounds and bounds.here)[0]
        return y

    def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
        return precise(x["x"], cu_seqlens=bounds)[0], x["x"]

    def step(x: Inputs, state: Tensor) -> Tensor:
        raise NotImplementedError("a block's state is several tensors")

    weights = sum(p.numel() for p in block.parameters() if p.ndim > 1)
    return Implementation(
        draw=draw, exact=exact, chunks=chunks, like="x",
        step=step, state=torch.empty, decodes=False,
        operations=lambda lengths: 2.0 * weights * sum(lengths),
        parameters=tuple(block.parameters()),
    )  # fmt: skip


def trainings(device: str, recipe: Recipe = RECIPE, steps: int = STEPS) -> Iterator[Trained]:
    """Take training steps of the model by every setting; bytes of noise are its text."""
    text = torch.randint(BYTES, (1 << 20,), dtype=torch.uint8)
    on_gpu = device == "cuda"
    warm = min(WARM_STEPS, steps)
    for setting, sizes in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.pt")
            training = Training(text, "", path, sizes, recipe, torch.device(device))
        for _ in range(warm):
            training.step()
        if on_gpu:
            free()
        start = time.perf_counter()
        for _ in range(steps):
            loss = training.step()  # it reads the loss, which waits for the GPU
        seconds = (time.perf_counter() - start) / steps
        half = torch.bfloat16 if on_gpu else None
        chosen = training.model.backends(half)
        yield Trained(
            setting=setting,
            parameters=sum(p.numel() for p in training.model.parameters()),
            batch=recipe.batch,
            tokens=recipe.tokens + 1,
            step_ms=seconds * 1e3,
            peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
            loss=loss,
            backends={name: backend.name for name, backend in chosen.items()},
        )
        del training
        if on_gpu:
            free()
