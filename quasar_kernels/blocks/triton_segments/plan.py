"""Segments and tiles of a call of WKV6 or SSD."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fla.ops.quasar.chunk_torch import sequence_lengths
from fla.ops.quasar.device import is_recorded
from fla.ops.quasar.segments import Segments, host_bounds, longest_of, packed_table
from fla.ops.quasar.triton_kernels.launch import compile_ahead
from fla.ops.quasar.triton_kernels.plan import multiprocessors
from torch import Tensor

from quasar_kernels.blocks.autograd import Kernels, KernelsFunction

ALONE = 128
"""Sequences up to this length are one segment, because the scan's launches would cost more."""
MIN_TOKENS = 64
"""Smallest number of tokens of a segment."""
PROGRAMS = 4
"""Target number of programs per multiprocessor, over the whole call."""
WHOLE = 1.4
"""Programs per multiprocessor from which sequences are not cut: cut ones need another pass."""


class LaunchOptions(NamedTuple):
    """Compile options of a kernel: warps per program, and pipeline stages of its loop."""

    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """The kernels' tiles for heads of one width."""

    keys: int  # columns of the keys, a power of two
    values: int  # columns of the values of one program
    chunk: int  # tokens
    sum: LaunchOptions
    output: LaunchOptions
    gradient: LaunchOptions
    precision: str  # Triton's `input_precision` of fp32 products


class Shape(NamedTuple):
    """One call's sizes."""

    B: int
    T: int
    H: int
    K: int  # channels of a head's keys
    V: int  # channels of a head's values


class Plan(NamedTuple):
    """One call's shape, tiles and segments."""

    shape: Shape
    tiles: Tiles
    segments: Segments

    @property
    def grid(self) -> tuple[int, int, int]:
        """The grid: segments times heads, and tiles of value columns."""
        shape = self.shape
        return self.segments.total * shape.H, -(-shape.V // self.tiles.values), 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, segments of a sequence and tokens of a segment, in the order of the kernels."""
        return self.shape.T, self.segments.per_sequence, self.segments.length

    @property
    def constants(self) -> tuple[int, ...]:
        """The first compile-time constants of the kernels, in their order."""
        _, _, H, K, V = self.shape
        return H, K, V, self.tiles.keys, self.tiles.values, self.tiles.chunk

    @property
    def chunks(self) -> int:
        """An upper bound on the number of chunks, each of which stores a state."""
        return self.shape.B * self.shape.T // self.tiles.chunk + self.segments.total + 1

    @property
    def several(self) -> bool:
        """Whether a sequence may have several segments."""
        return self.segments.total > self.segments.sequences

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed."""
        return self.segments.table is not None


def plan_call(
    shape: Shape,
    device: torch.device,
    cu_seqlens: Tensor | None,
    segments: int | None,
    tiles: Tiles,
) -> Plan:
    """Cut a call into segments; the first call with a `cu_seqlens` tensor waits for the GPU.

    `segments` replaces the built-in number of segments of the longest possible sequence.

    Raises:
        ValueError: the bounds `cu_seqlens` do not fit one row of T tokens.
    """
    B, T, H, _, V = shape
    programs = H * -(-V // tiles.values)  # of a sequence
    bounds = None
    if cu_seqlens is not None:
        sequence_lengths(cu_seqlens, B, T)  # refuses bounds that do not fit
        bounds = host_bounds(cu_seqlens)
    longest = T if bounds is None else longest_of(bounds)
    units = multiprocessors(device) or 1
    if segments is not None:
        length = math.ceil(T / segments)
    elif longest <= ALONE or B * T * programs >= WHOLE * units * longest:
        length = max(longest, 1)
    else:
        most = PROGRAMS * units // (programs * B)
        length = math.ceil(T / max(1, min(most, math.ceil(T / MIN_TOKENS))))
    length = tiles.chunk * math.ceil(length / tiles.chunk)
    if bounds is None:
        count = math.ceil(T / length)
        return Plan(shape, tiles, Segments(B * count, B, count, length, None, None, length))
    packed = packed_table(bounds, length, device)
    cut = Segments(packed.table.shape[0], len(bounds) - 1, 0, 0, *packed)
    return Plan(shape, tiles, cut)


Step = Callable[[Shape, Any, Tensor | None, Tiles], tuple[Tensor, Tensor]]
"""Takes the shape, inputs of one token per sequence, the initial state and tiles."""


def apply(
    kernels: Kernels,
    step: Step,
    shape: Shape,
    tiles: Tiles,
    inputs: tuple[Tensor | None, ...],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    segments: int | None,
) -> tuple[Tensor, Tensor]:
    """Compute a call, differentiably; `segments` and the errors are those of `plan_call`."""
    state = None if initial_state is None else initial_state.float().contiguous()
    recorded = is_recorded(*inputs, state)
    if not recorded and shape.T == 1 and cu_seqlens is None:
        return step(shape, inputs, state, tiles)
    device = next(x.device for x in inputs if x is not None)
    plan = plan_call(shape, device, cu_seqlens, segments, tiles)
    if device.type == "cuda":
        kinds = tuple(None if x is None else x.dtype for x in (*inputs, state))
        key = kernels, shape[2:], kinds, tiles, plan.several, plan.packed, recorded
        compile_ahead(key, _passes, kernels, plan, inputs, state, recorded)
    if not recorded:
        run = kernels.forward(plan, inputs, state, False)
        return run.o, run.final_state
    results: tuple[Tensor, Tensor] = KernelsFunction.apply(kernels, plan, state, *inputs)
    return results


def _passes(
    kernels: Kernels, plan: Plan, inputs: Any, state: Tensor | None, training: bool
) -> None:
    run = kernels.forward(plan, inputs, state, training)
    if training:
        kernels.backward(
            plan, inputs, run.checkpoints, torch.empty_like(run.o), None, state is not None
        )
