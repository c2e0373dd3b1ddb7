"""Greedy decoding by transformers' own loop, for models that a static cache does not fit.

Hybrid models keep other states than keys and values: those of linear attention, convolutions or
recurrences. Only their own code can create and advance these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from neurons.inference_server.queue import Generation

CHECK_STEPS = 16
"""Steps between two checks whether the request was cancelled."""


def has_own_cache(config: Any) -> bool:
    """Return whether a model of this configuration needs its own cache."""
    from transformers import StaticCache

    try:
        layers: Any = StaticCache(config=config, max_cache_len=1).layers
        return not all(hasattr(layer, "max_cache_len") for layer in layers)
    except Exception:  # without attention layers in the configuration, StaticCache may raise any
        return True


class _Watch(LogitsProcessor):
    """Reads the logits of each step, keeps those of one step, and changes none."""

    def __init__(self, capture_at: int | None, cancelled: Callable[[], bool]) -> None:
        self._capture_at, self._cancelled = capture_at, cancelled
        self._step = 0
        self.captured: list[float] | None = None
        self.first = 0.0  # the time of the first logits

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._step += 1
        if self._step == 1:
            self.first = time.perf_counter()
        if self._step == self._capture_at:
            self.captured = scores[0].float().tolist()
        if self._step % CHECK_STEPS == 0 and self._cancelled():
            raise InterruptedError
        return scores


def generate(
    model: Any,
    prompt: Sequence[int],
    new_tokens: int,
    capture_at: int | None,
    cancelled: Callable[[], bool],
) -> Generation:
    """Return `new_tokens` tokens, as `Decoder.generate` does."""
    begun = time.perf_counter()
    watch = _Watch(capture_at, cancelled)
    tokens = torch.tensor([list(prompt)], device=model.device)
    # the model's own configuration may sample, or penalise tokens
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    text = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([watch]),
    )
    chosen = text[0, len(prompt) :].tolist()
    return Generation(chosen, watch.captured, time.perf_counter() - begun, watch.first - begun)
