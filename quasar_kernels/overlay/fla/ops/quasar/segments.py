"""The segments of a call's sequences, for all kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

WHOLE_WARPS = 2.8
"""Sequences are not cut if a pass over them has at least this many warps per multiprocessor."""
WHOLE_TOKENS = 24_576
"""Longer sequences need twice as many warps, because cutting them costs less: the maps of long
segments are computed only as far as their heads remember."""

_known_bounds = WeakIdKeyDictionary()  # from a tensor to its version and its values


def host_bounds(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """Return the values of `[N + 1]` bounds.

    A copy from a GPU makes the host wait, so the values are copied once for each version of a
    tensor, and the layers of a model share the copy. Operations of torch increase the version, but
    collectives such as `dist.broadcast` do not: pass a new tensor after one of these. Bounds on a
    CPU may also change through numpy, and are cheap to read at each call.
    """
    if not cu_seqlens.is_cuda or cu_seqlens.is_inference():  # inference tensors have no version
        return tuple(cu_seqlens.tolist())
    version, bounds = _known_bounds.get(cu_seqlens, (None, ()))
    if version != cu_seqlens._version:
        bounds = tuple(cu_seqlens.tolist())
        _known_bounds[cu_seqlens] = cu_seqlens._version, bounds
    return bounds


@functools.lru_cache(64)
def longest_of(bounds: tuple[int, ...]) -> int:
    """Return the number of tokens of the longest sequence between `bounds`."""
    return max((stop - start for start, stop in itertools.pairwise(bounds)), default=0)


@functools.lru_cache(1024)
def stay_whole(longest: int, tokens: int, warps: int, multiprocessors: int) -> bool:
    """Return whether a call's sequences are not cut into segments.

    Segments occupy the whole GPU, but their maps and the scan over the maps take time. Sequences
    that occupy most of the GPU by themselves are therefore faster in one piece.

    Args:
        longest: tokens of the longest sequence.
        tokens: tokens of all sequences.
        warps: warps that process one sequence with all its heads.
        multiprocessors: of the GPU.
    """
    least = WHOLE_WARPS if longest <= WHOLE_TOKENS else 2 * WHOLE_WARPS
    return tokens / max(longest, 1) * warps >= least * multiprocessors


def dividing(every: int, length: int, tile: int) -> int:
    """Return the longest segment of at most `length` tokens that divides `every`.

    Args:
        every: tokens between checkpoints, a multiple of `tile`.
        length: tokens of a segment.
        tile: the result is a multiple of it.
    """
    tiles = every // tile
    return tile * max(
        n for n in range(1, tiles + 1) if not tiles % n and n * tile <= max(length, tile)
    )


class PackedTable(NamedTuple):
    """The segments of packed sequences."""

    table: torch.Tensor
    """`[total, 4]` int64: sequence, first token, number of tokens, and a bit field: 1 for the
    sequence's first segment, 2 for its last one."""
    first: torch.Tensor  # [sequences + 1] int64: each sequence's first segment
    longest: int  # tokens of the longest segment


def packed_table(
    bounds: Sequence[int], length: int, device: torch.device, longest_first: bool = False
) -> PackedTable:
    """Cut sequences into segments of `length` tokens; `bounds` has N + 1 numbers.

    With `longest_first`, if no sequence is cut, they are sorted by length, so that the GPU does not
    wait for a long one that starts last; `first` is then not valid. Calls with equal arguments
    share one table, which must not be changed.
    """
    return _packed_table(tuple(bounds), length, device, longest_first)


@functools.lru_cache(64)
def _packed_table(
    bounds: tuple[int, ...], length: int, device: torch.device, longest_first: bool
) -> PackedTable:
    table, first = [], [0]
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        # an empty sequence has one empty segment, which passes the initial state on
        starts = range(start, stop, length) or (start,)
        for t in starts:
            place = (t == starts[0]) + 2 * (t == starts[-1])
            table.append((n, t, min(length, stop - t), place))
        first.append(len(table))
    if longest_first and len(table) < len(bounds):
        table.sort(key=lambda row: -row[2])
    rows = torch.tensor(table, dtype=torch.int64, device=device).view(-1, 4)
    firsts = torch.tensor(first, dtype=torch.int64, device=device)
    return PackedTable(rows, firsts, max((tokens for _, _, tokens, _ in table), default=0))


class Segments(NamedTuple):
    """The segments of a call."""

    total: int  # segments of all sequences
    sequences: int
    per_sequence: int  # segments of each sequence; 0 when packed
    length: int  # tokens of a segment; 0 when packed
    table: torch.Tensor | None  # packed: [total, 4] int64, of a `PackedTable`
    first: torch.Tensor | None  # packed: [sequences + 1] int64
    longest: int  # tokens of the longest segment

    def are_even(self, tokens: int, tile: int) -> bool:
        """Return whether at least a quarter of a grid with the longest segment's tiles has work.

        Args:
            tokens: of all sequences.
            tile: tokens of a tile.
        """
        parts = -(-max(self.longest, 1) // tile)
        return self.table is None or self.total * parts <= 4 * (tokens // tile + self.total)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
