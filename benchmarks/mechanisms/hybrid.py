"""A hybrid block of all three branches, and training steps of a small hybrid model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine.clocks import free, single_ms
from benchmarks.engine.comparison import Inputs
from benchmarks.engine.mechanism import OURS, Bounds, Calls, Implementation
from benchmarks.engine.results import Entry

if TYPE_CHECKING:
    from quasar_kernels.blocks import BlockState

BLOCK_WIDTH, BLOCK_HEADS = 512, 8
PROMPT = 32
"""Tokens of the prompt before the decoded token."""

WARM_STEPS, STEPS, BUSY_STEPS = 4, 12, 3


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


def trainings(device: str) -> Iterator[Entry]:
    """Run training steps of the model with each setting, on random bytes as text."""
    from quasar_kernels.blocks.language import Recipe, Sizes, Training

    # 3.8 million parameters: heads of 64 channels, and of 128 in Mamba-2
    kept = Sizes(width=192, heads=3, layers=4, inner=640)
    settings = {
        "everything kept": kept,
        "blocks computed again (checkpoint_above=256)": kept._replace(checkpoint_above=256),
    }
    on_gpu = device == "cuda"
    # sequences of 512 tokens, of which the last one is only a target
    recipe, steps = (Recipe(511, 64), STEPS) if on_gpu else (Recipe(31, 2), 1)
    text = torch.randint(256, (1 << 20,), dtype=torch.uint8).numpy().tobytes()
    for setting, sizes in settings.items():
        free()
        training = Training(text, sizes, recipe, torch.device(device))
        step_ms = single_ms(training.step, steps, min(WARM_STEPS, steps)).wall
        loss = training.step()
        block: Any = training.model.blocks[0]
        chosen = block.backends(torch.bfloat16 if on_gpu else None)
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        busy = kernel_seconds(training.step, BUSY_STEPS) / step_ms * 1e3 if on_gpu else 0
        parameters = sum(p.numel() for p in training.model.parameters())
        yield Entry(
            table="training",
            of={
                "setting": setting,
                "parameters": parameters,
                "batch": recipe.batch,
                "tokens": recipe.tokens + 1,
            },
            by="model",
            figures={
                "step_ms": step_ms,
                "peak_bytes": peak,
                "loss": loss,
                "busy": min(1.0, busy),
            },
            texts={name: backend.name for name, backend in chosen.items()},
        )
        del training
        free()


def kernel_seconds(call: Callable[[], object], times: int) -> float:
    """Return the seconds that the GPU's kernels and copies take in one of several calls."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    total: float = sum(event.self_device_time_total for event in profiler.key_averages())
    return total / 1e6 / times


IMPLEMENTATIONS = {
    "block": Implementation("hybrid block", OURS, make),
    "model": Implementation("hybrid model", OURS, None, entries=trainings),
}
