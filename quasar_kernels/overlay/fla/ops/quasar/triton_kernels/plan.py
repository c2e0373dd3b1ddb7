"""The segments of a call for the Triton kernels, and the arguments that they share."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from fla.ops.quasar.segments import (
    Segments,
    dividing,
    host_bounds,
    longest_of,
    packed_table,
    stay_whole,
)
from fla.ops.quasar.triton_kernels.launch import padded
from fla.ops.quasar.triton_kernels.tiles import Tiles, tiles_for


@functools.cache
def multiprocessors(device: torch.device) -> int | None:
    """Return a GPU's number of multiprocessors; None for another device."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _programs_per_wave(device: torch.device) -> int:
    # four programs of two warps and about 255 registers per thread fill a multiprocessor; the
    # interpreter gets 16, enough for several segments
    return 4 * (multiprocessors(device) or 4)


def _stay_whole(q: torch.Tensor, tiles: Tiles, longest: int) -> bool:
    units = multiprocessors(q.device)
    B, T, H, S = q.shape
    warps = H * -(-S // tiles.value_cols) * tiles.output_warps
    return units is not None and stay_whole(longest, B * T, warps, units)


def segments_for(tokens: int, chains: int, wave: int, chunk: int) -> tuple[int, int]:
    """Return the number of segments of each sequence and their length, a multiple of `chunk`.

    Args:
        tokens: tokens of the (longest) sequence.
        chains: sequences times heads, each of which is processed sequentially.
        wave: programs that the device runs at once.
        chunk: tokens of a chunk.
    """
    tokens = max(tokens, 1)
    # a pass costs about tokens / n, the scan over the maps as much as 8 tokens per segment
    n = max(1, min(math.isqrt(tokens // 8), wave // chains))
    length = chunk * -(-tokens // (n * chunk))
    return -(-tokens // length), length


class Plan(NamedTuple):
    """The segments of one call, and the arguments that its kernels share."""

    tiles: Tiles
    total: int  # segments of all sequences
    sequences: int
    per_sequence: int  # segments of each sequence; 0 when packed
    length: int  # tokens of a segment; 0 when packed
    table: torch.Tensor | None  # packed: [total, 4], of a `PackedTable`
    first: torch.Tensor | None  # packed: [sequences + 1]
    longest: int  # tokens of the longest segment
    wave: int  # programs that the device runs at once
    block: int  # S padded to a power of two
    precision: str  # of the products


def plan_segments(
    q: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    tiles: Tiles | None = None,
    segments: int | None = None,
    every: int | None = None,
) -> Plan:
    """Cut the sequences of `q` [B, T, H, S] into segments.

    Args:
        cu_seqlens: the bounds of packed sequences, or None.
        tiles: replaces the choice of `tiles_for`.
        segments: replaces the number of segments of `segments_for`; only without cu_seqlens.
        every: n, a multiple of 64, if a segment must end after every n tokens; otherwise None.
    """
    B, T, H, _ = q.shape
    tiles = tiles or tiles_for(padded(q.shape[-1], 16), q.dtype, q.device)
    wave = _programs_per_wave(q.device)
    if cu_seqlens is not None:
        bounds = host_bounds(cu_seqlens)
        longest = longest_of(bounds)
        if _stay_whole(q, tiles, longest):
            length = tiles.chunk * -(-max(longest, 1) // tiles.chunk)
        else:
            _, length = segments_for(bounds[-1], H, wave, tiles.chunk)
        length = length if every is None else dividing(every, length, tiles.chunk)
        packed = packed_table(bounds, length, q.device)
        cut = Segments(packed.table.shape[0], len(bounds) - 1, 0, 0, *packed)
    else:
        _, length = segments_for(T, B * H, wave, tiles.chunk)
        if segments is None and _stay_whole(q, tiles, T):
            segments = 1
        if segments is not None:
            length = tiles.chunk * -(-T // (segments * tiles.chunk))
        length = length if every is None else dividing(every, length, tiles.chunk)
        count = -(-max(T, 1) // length)
        cut = Segments(B * count, B, count, length, None, None, length)
    return plan_of(q, cut, tiles)


def plan_of(q: torch.Tensor, cut: Segments, tiles: Tiles | None = None) -> Plan:
    """Return a plan with these segments; the other arguments are those of `plan_segments`."""
    block = padded(q.shape[-1], 16)
    tiles = tiles or tiles_for(block, q.dtype, q.device)
    # Triton's `input_precision`, which affects products of fp32 operands only
    precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
    wave = _programs_per_wave(q.device)
    return Plan(tiles, *cut, wave, block, precision)  # type: ignore[call-arg] # seven of `Segments`


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
