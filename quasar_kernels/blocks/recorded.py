"""Training steps replayed from a CUDA graph, because small models launch slower than they compute.

The first steps run normally. Then one step is captured in a CUDA graph, and the following steps
replay it with new inputs. A step must therefore neither wait for the GPU nor read results from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

WARM_STEPS = 3
"""Steps before the capture: they compile the kernels and allocate the optimizer's state."""
_log = logging.getLogger(__name__)


class RecordedStep:
    """Runs training steps, by replay where the device and the step allow it.

    Args:
        step: maps tensors to one tensor; it computes the gradients and updates the parameters.
        device: the device of the model, the optimizer's state and the inputs.
    """

    def __init__(self, step: Callable[..., Tensor], device: torch.device) -> None:
        self._step, self._device = step, device
        self._calls = 0
        self._inputs: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None
        self._refused = device.type != "cuda"
        # autograd runs a backward pass on its forward pass's stream, so all steps use one stream
        self._stream = None if self._refused else torch.cuda.Stream(device)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run one step, with the shapes of the first one. The next call overwrites the result."""
        if self._stream is None:
            return self._step(*inputs)
        self._calls += 1
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = self._on_stream(inputs)
        here.wait_stream(self._stream)
        return result

    def _on_stream(self, inputs: tuple[Tensor, ...]) -> Tensor:
        if self._calls > WARM_STEPS and self._graph is None and not self._refused:
            self._record(inputs)
        if self._graph is None or self._result is None:
            return self._step(*inputs)
        for buffer, new in zip(self._inputs, inputs, strict=True):
            buffer.copy_(new)
        self._graph.replay()
        return self._result

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        """Capture a step without running it. If that fails, warn, and launch all later steps."""
        self._inputs = [x.clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._result = self._step(*self._inputs)
            self._graph = graph
        except RuntimeError as error:
            self._refused = True
            line = str(error).strip().splitlines()[0]
            _log.warning("training steps are launched instead of replayed: %s", line)
