"""Training steps by CUDA graph: a small model's step takes longer to launch than to compute.

The first steps are launched. Then one is recorded as a CUDA graph, and later steps replay it on
their inputs. A step must therefore neither synchronize nor copy results to the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

WARM_STEPS = 3
"""Steps before the recorded one: kernels are compiled and the optimizer's state is made in them."""
_log = logging.getLogger(__name__)


class RecordedStep:
    """Takes training steps, by replays if possible.

    Args:
        step: takes tensors and returns one; it recomputes the gradients and updates the parameters.
        device: where all of it is.
    """

    def __init__(self, step: Callable[..., Tensor], device: torch.device) -> None:
        self._step, self._device = step, device
        self._taken = 0
        self._inputs: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None
        self._refused = device.type != "cuda"
        # autograd goes back on the streams of the forward pass: all steps are taken on one
        self._stream = None if self._refused else torch.cuda.Stream(device)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Take one step; all calls have equal input shapes. The next call overwrites the result."""
        if self._stream is None:
            return self._step(*inputs)
        self._taken += 1
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = self._on_stream(inputs)
        here.wait_stream(self._stream)
        return result

    def _on_stream(self, inputs: tuple[Tensor, ...]) -> Tensor:
        if self._taken > WARM_STEPS and self._graph is None and not self._refused:
            self._record(inputs)
        if self._graph is None or self._result is None:
            return self._step(*inputs)
        for buffer, new in zip(self._inputs, inputs, strict=True):
            buffer.copy_(new)
        self._graph.replay()
        return self._result

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        """Record a step without taking it; if that fails, log it once and launch all steps."""
        self._inputs = [x.clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._result = self._step(*self._inputs)
            self._graph = graph
        except RuntimeError as error:
            self._refused = True
            line = str(error).strip().splitlines()[0]
            _log.warning("training steps are not replayed, but launched: %s", line)
