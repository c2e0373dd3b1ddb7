"""The memory of what a training step of the adaptive layer saves: one allocation for all results.

A CUDA graph writes to the addresses that it was captured with. Saved results must outlive its next
replay, so they are not in the graph's own memory: the caller allocates memory, to which the graph
writes them. In training, torch's allocator returns the same address in each step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.cuda.scan.scan_forward import READ_STEP
from fla.ops.quasar.layer import paths, wide
from fla.ops.quasar.layer.adaptive import (
    MAX_ELEMENTS,
    AdaptiveResults,
    adaptive_forward,
    gated_output,
    rows_of,
)
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.first_step import OPERATOR_DTYPE, AdaptiveWeights, product_columns
from fla.ops.quasar.layer.graphs import Inputs, Operation, Tensors, launch_or_replay
from fla.ops.quasar.layer.operator_inputs import Rotation
from fla.ops.quasar.segments import Segments

_ALIGNMENT = 256  # bytes, as of torch's own allocations


class _Place(NamedTuple):
    """A tensor's place in the memory, from byte `start` to `stop`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


@functools.lru_cache(64)
def _layout(
    H: int, S: int, dtype: torch.dtype, R: int, hidden: int, columns: int
) -> tuple[AdaptiveResults, int]:
    """Return the places of the results, and the size of the memory in bytes."""
    half, fp32, width = OPERATOR_DTYPE, torch.float32, H * S
    kinds: Any = AdaptiveResults(
        rows=((R, hidden), dtype),
        products=((R, 3 * width), half),
        qkv=((R, 3 * width), half),
        narrow=((R, S), dtype),
        logits=((R, columns - 3 * width - S), fp32),
        lengths=((R, 2, H), fp32),
        step=((R, H), fp32),
        o=((R, width), half),
        product=((columns, hidden), dtype),
        gate_up=((width, S), dtype),
        gate_bias=((width,), dtype),
        out=((hidden, width), dtype),
    )
    start, places = 0, []
    for shape, kind in kinds:
        places.append(_Place(shape, kind, start, start + math.prod(shape) * kind.itemsize))
        start = -(-places[-1].stop // _ALIGNMENT) * _ALIGNMENT
    return AdaptiveResults(*places), start


def _layout_of(
    call: Call, shape: Sequence[int], weights: AdaptiveWeights
) -> tuple[AdaptiveResults, int]:
    B, T, hidden = shape
    return _layout(call.heads, call.head_dim, call.dtype, B * T, hidden, product_columns(weights))


def _view(memory: torch.Tensor, place: Any) -> torch.Tensor:
    return memory[place.start : place.stop].view(place.dtype).view(place.shape)


def _new(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.new_empty(size, dtype=torch.uint8)


def run_saving(
    call: Call, owner: object, rotation: Rotation | None, x: torch.Tensor, weights: AdaptiveWeights
) -> tuple[torch.Tensor, Any, Tensors]:
    """Return y, the operator's segments, and what the backward pass needs."""
    # the projection first: it compiles while the operator's program compiles in the background
    path = paths.choose_products(call, x, weights.layer, wide.FP16_RESULTS)
    program = None if path.program is None else _scan_program(call, x)
    if program is not None:
        places, size = _layout_of(call, x.shape, weights)
        memory = _new(x, size)
        _view(memory, places.rows).copy_(x.flatten(0, 1))
        heads = (*x.shape[:2], call.heads, call.head_dim)
        cut = cuda_scan.cut_segments(program, heads, x.device, call.cu_seqlens)
        maps = None  # memory for G and the states of `Saved`, if a sequence is cut
        if cut.total > cut.sequences:
            size_of_state = call.heads, call.head_dim, call.head_dim
            maps = memory.new_empty(2, cut.total, *size_of_state, dtype=torch.float32)
        settings = call, tuple(x.shape), cut
        tensors = (memory, maps, *(rotation or (None, None)), *weights.tensors())
        bounds = call.cu_seqlens  # a graph cannot copy them from the host
        if x.numel() > MAX_ELEMENTS or not (bounds is None or bounds.is_cuda):
            owner = None
        try:
            y: torch.Tensor = launch_or_replay(
                owner, SAVING, settings, (), tensors, call.dtype, size
            )[1]
        except CudaUnavailableError:
            if call.backend == "cuda":
                raise
        else:
            return y, cut, (memory, maps)
    rows = rows_of(call, x)
    results, saved = adaptive_forward(call, rotation, x.shape, rows, weights, save=True)
    normed = gated_output(call, x.shape, results, weights.layer.norm)
    return F.linear(normed, results.out), saved.segments, (*results, saved.G, saved.states)


def _scan_program(call: Call, x: torch.Tensor) -> LoadedProgram | None:
    """Return the operator's CUDA program, or None if it does not support the call."""
    if call.backend == "triton" or call.head_dim not in cuda_scan.HEAD_DIMS or not x.numel():
        return None
    size = x.device.index, OPERATOR_DTYPE, call.heads, call.head_dim
    return cuda_scan.PROGRAM.find_loaded(cuda_scan.variant_for(*size, READ_STEP))


def _compute_saving(settings: Any, inputs: Inputs, tensors: Tensors) -> tuple[Tensors, Tensors]:
    call, shape, _ = settings
    memory, maps, cos, sin, *others = list[Any](tensors)
    weights = AdaptiveWeights.of(others)
    into = _results_in(memory, call, shape, weights)
    parts = (None, None) if maps is None else maps
    rotation = None if cos is None else Rotation(cos, sin)
    results, _ = adaptive_forward(
        call, rotation, shape, into.rows, weights, save=True, into=into, maps=parts
    )
    return [], (gated_output(call, shape, results, weights.layer.norm),)


def _finish_saving(settings: Any, inputs: Inputs, tensors: Tensors, rest: Tensors) -> torch.Tensor:
    """Return the layer's output."""
    call, shape, _ = settings
    memory, _, _, _, *weights = list[Any](tensors)
    places, _ = _layout_of(call, shape, AdaptiveWeights.of(weights))
    return F.linear(rest[0], _view(memory, places.out))


SAVING = Operation(_compute_saving, _finish_saving, lambda *_: [])
"""The forward pass that saves its results. The settings are (call, x's shape, segments); the
tensors are the memory, which already holds the rows, the maps' memory, the rotation's tables, and
the weights."""


def _results_in(
    memory: torch.Tensor, call: Call, shape: Sequence[int], weights: AdaptiveWeights
) -> AdaptiveResults:
    places, _ = _layout_of(call, shape, weights)
    return AdaptiveResults(*(_view(memory, place) for place in places))


def saved_results(
    call: Call, shape: Sequence[int], weights: AdaptiveWeights, saved: Sequence[Any]
) -> tuple[AdaptiveResults, Sequence[Any]]:
    """Return the results, and G and the states, from what `run_saving` returned last."""
    if len(saved) > 2:
        return AdaptiveResults(*saved[:-2]), saved[-2:]
    memory, maps = saved
    return _results_in(memory, call, shape, weights), (None, None) if maps is None else maps


def saved_factors(
    call: Call, shape: Sequence[int], weights: AdaptiveWeights, saved: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product's weights and the rows, from what `run_saving` returned last."""
    if len(saved) > 2:
        results = AdaptiveResults(*saved[:-2])
        return results.product, results.rows
    places, _ = _layout_of(call, shape, weights)
    return _view(saved[0], places.product), _view(saved[0], places.rows)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
