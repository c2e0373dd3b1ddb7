"""The segmented scan's backward pass in CUDA C++: supported calls and launches.

It computes the same as triton_kernels/segmented_scan_bwd.py, from the results of scan_forward.py.
The kernels are in csrc/backward.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from fla.ops.quasar.cuda.driver import PARAMETERS, TENSOR_MAP
from fla.ops.quasar.cuda.nvrtc import HOPPER
from fla.ops.quasar.cuda.program import (
    FLOAT,
    INT,
    INT64,
    POINTER,
    CudaProgram,
    LoadedProgram,
    addresses,
    fields,
    serializer,
)
from fla.ops.quasar.cuda.scan.scan_forward import (
    CSRC,
    PANEL,
    SCAN_COLUMNS,
    TILE,
    step_options,
    tensor_maps,
    variant_of,
)
from fla.ops.quasar.gate import divisible
from fla.ops.quasar.operator_types import Gradients, Saved
from fla.ops.quasar.segments import Segments


LONG = 8192
"""Minimum length of the longest segment for which state_gradient_map searches for tokens that
decays make negligible. In shorter segments the search costs more time than it saves."""
_SMALL = 16 << 20  # bytes up to which torch's allocator puts several tensors into one block
NO_MAPS = bytes(8 * TENSOR_MAP)
"""The second parameter on GPUs without tensor maps."""


class Arguments(ctypes.Structure):
    """`quasar::scan::GradientArguments` of gradients.cuh."""

    _fields_ = [
        *fields(POINTER, "q k v d_o dq dk dv checkpoints beta initial_state d_final maps states"),
        *fields(POINTER, "d_states d_initial d_beta d_decay table first"),
        *fields(INT64, "T length"),
        *fields(INT64 * 3, "q_stride k_stride v_stride o_stride"),
        *fields(INT, "per_sequence heads parts"),
        *fields(FLOAT, "scale"),
        *fields(POINTER, "decay"),
        *fields(INT, "group omits"),
    ]


_PARTS = ("state_checkpoint", "state_gradient", "gradient_scan", "input_gradient")
_KERNELS = (
    "state_checkpoint_{}",
    "state_gradient_map_{}",
    "gradient_scan",
    "state_gradient_{}",
    "input_gradient_{}",
)
PROGRAM = CudaProgram(
    "segmented_scan_bwd",
    [CSRC / "backward" / f"{part}.cu" for part in _PARTS],
    dict.fromkeys(_KERNELS, Arguments),
    "the CUDA kernels of the gradients are not used, Triton serves: %s",
    parallel=True,
)
serialize = serializer(Arguments)


def is_for(device: int, width: int) -> bool:
    """Return whether the kernels support heads of `width` in a call that scan_forward.py supports.

    For heads of 128 channels, a tile of input_gradient.cu takes 225 KB of shared memory, and that
    code exists for Hopper only.
    """
    return width == PANEL or torch.cuda.get_device_capability(device) == HOPPER


def gradient_maps(
    shape: tuple[int, ...],
    group: int,
    pointers: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
) -> bytes:
    """Return `GradientMaps` of gradients.cuh for q, k, v, d_o and the tensors with d_o's strides.

    `shape` is v's; `group` of its heads share one of q and k.
    """
    *others, o = strides
    B, T, H, S = shape
    heads = *(H // group,) * 2, *(H,) * 6
    return tensor_maps((B, T, S), heads, pointers, (*others, *[o] * 5), (TILE,) * 8)


def tile_table(table: torch.Tensor, tile: int) -> torch.Tensor:
    """Cut the rows of a `PackedTable.table` into rows of at most `tile` tokens.

    The host waits for the GPU.
    """
    counts = (table[:, 2] + tile - 1).div(tile, rounding_mode="floor").clamp(min=1)
    sequence, begin, tokens, place = table.repeat_interleave(counts, 0).unbind(1)
    ends = counts.cumsum(0)
    index = torch.arange(sequence.numel(), device=table.device)
    n = index - (ends - counts).repeat_interleave(counts)  # of the tile in its row
    is_last = n == counts.repeat_interleave(counts) - 1
    kept = (place & 1) * (n == 0) + (place & 2) * is_last
    return torch.stack([sequence, begin + n * tile, (tokens - n * tile).clamp(max=tile), kept], 1)


def cut_tiles(cut: Segments, tokens: int, tile: int) -> tuple[int, int, torch.Tensor | None]:
    """Return the number of rows, the tiles of a row and the row table of input_gradient.cu.

    The rows are the segments. If most of their tiles would be empty, because a few packed sequences
    are much longer than the others, each row is a tile.
    """
    parts = math.ceil(max(cut.longest, 1) / tile)
    if cut.are_even(tokens, tile):
        return cut.total, parts, cut.table
    table = tile_table(cut.table, tile)
    return table.shape[0], 1, table


def like_parts(d_o: torch.Tensor, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a tensor like `d_o` for each of `parts`.

    Small tensors share one allocation if `parts` do. Otherwise they would be freed separately and
    fragment the blocks of torch's allocator, which costs a third of a CUDA graph's memory.
    """
    if d_o.nbytes > _SMALL or len({x.untyped_storage().data_ptr() for x in parts}) > 1:
        return [torch.empty_like(d_o) for _ in parts]
    return d_o.new_empty(len(parts), *d_o.shape).unbind()


def backward(
    saved: Saved,
    d_o: torch.Tensor,
    d_final: torch.Tensor | None = None,
    *,
    program: LoadedProgram | None = None,
) -> Gradients:
    """Run the backward pass on the current stream; q's device must be the current one.

    In addition to the gradients it allocates one tensor like v, for the checkpoints, and a matrix
    `[S, S]` in fp32 for each segment and head. Until input_gradient runs, dq holds V' and dk the
    checkpoints of dS.

    Args:
        saved: from `forward` in scan_forward.py.
        d_o: the gradient of o, `[B, T, H, S]` contiguous, in q's dtype.
        d_final: `[sequences, H, S, S]` fp32 contiguous, or None for zero.
        program: PROGRAM, loaded for this kind of call; None loads it.

    Raises:
        CudaUnavailableError: the kernels cannot be compiled, loaded or launched.
    """
    inputs, G, states, cut = saved
    q, k, v, (steps, per_token), initial_state, _, scale, g = inputs
    T, H, S = v.shape[1:]
    group = H // q.shape[2]
    program = program or PROGRAM.load(variant_of(v, step_options(inputs)))
    if per_token:
        steps = divisible(steps, q.dtype)
    if d_o.data_ptr() % 16:  # a view of another tensor may have any alignment
        d_o = d_o.clone()
    dq, dk, dv = like_parts(d_o, (q, k, v))
    checkpoints = torch.empty_like(d_o)
    rows, parts, tiles = cut_tiles(cut, T, S)
    d_beta = steps.new_empty(steps.shape if per_token else (rows * parts, H))
    d_decay = None if g is None else torch.empty_like(d_beta)
    d_states = None if G is None else torch.empty_like(G)
    d_initial = None if initial_state is None else torch.empty_like(initial_state)
    *pointers, table, first, tile_rows, decay = addresses(
        q, k, v, d_o, dq, dk, dv, checkpoints, steps, initial_state, d_final, G, states, d_states,
        d_initial, d_beta, d_decay, cut.table, cut.first, tiles, g,
    )  # fmt: skip
    qs, ks, vs, os = q.stride()[:3], k.stride()[:3], v.stride()[:3], d_o.stride()[:3]
    sizes = T, cut.length, *qs, *ks, *vs, *os, cut.per_sequence, H, parts, scale, decay, group
    omits = cut.longest >= LONG
    maps = NO_MAPS
    if program.on_hopper:
        maps = gradient_maps(v.shape, group, tuple(pointers[:8]), (qs, ks, vs, os))
    parameters = PARAMETERS(serialize(*pointers, table, first, *sizes, omits), maps)
    by_tiles = PARAMETERS(serialize(*pointers, tile_rows, 0, *sizes, omits), maps)
    walk_grid = cut.total * H * (S // PANEL), 1
    kernels = program.kernels
    kernels["state_checkpoint"].launch(walk_grid, parameters)
    if G is not None:
        kernels["state_gradient_map"].launch(walk_grid, parameters)
        scan_grid = cut.sequences * H, S // SCAN_COLUMNS
        kernels["gradient_scan"].launch(scan_grid, parameters)
    kernels["state_gradient"].launch(walk_grid, parameters)
    kernels["input_gradient"].launch((rows * parts * H, 1), by_tiles)
    return Gradients(dq, dk, dv, d_beta if per_token else d_beta.sum(0), d_initial, d_decay)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
