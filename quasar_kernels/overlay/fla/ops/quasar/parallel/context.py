"""The slice of packed sequences that a rank holds, and the ranks that share its sequences.

Ranks hold consecutive slices of one packed row. A slice may begin and end within a sequence, so its
first sequence may begin on an earlier rank, and its last one may continue on later ranks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SequenceContext:
    """A rank's slice, with the attributes of flash-linear-attention's `FLACPContext`.

    That class describes slices of equal lengths only; this one describes slices of any lengths.
    """

    group: dist.ProcessGroup
    cu_seqlens: torch.Tensor  # [n + 1] int32: bounds of the n sequences in this slice, from 0
    cu_seqlens_cpu: torch.Tensor  # the same on the host
    lengths: tuple[int, ...]  # tokens of every rank's slice
    pre_num_ranks: int  # earlier ranks, back to the one where the first sequence begins
    post_num_ranks: int  # later ranks, up to the one where the last sequence ends
    pre_num_conv_tokens: int  # tokens of the first sequence on earlier ranks
    conv1d_kernel_size: int | None = None
    layout: str = "contiguous"

    @property
    def is_first_rank(self) -> bool:
        """Whether the first sequence begins in this slice."""
        return self.pre_num_ranks == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether the last sequence ends in this slice."""
        return self.post_num_ranks == 0


class Place(NamedTuple):
    """The values of a context that a call uses."""

    group: dist.ProcessGroup
    rank: int
    bounds: tuple[int, ...]  # of the sequences in this slice
    before: int  # ranks, as `pre_num_ranks`
    after: int  # ranks, as `post_num_ranks`
    longest: int  # tokens of the longest slice of any rank


def build_cp_context(
    cu_seqlens: torch.Tensor,
    group: Any,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    lengths: Sequence[int] | None = None,
) -> SequenceContext:
    """Return the context of this rank's slice, as flash-linear-attention's function of this name.

    Args:
        cu_seqlens: `[N + 1]` bounds of all sequences, the same on every rank. Empty sequences are
            in no slice.
        group: the ranks' process group, or a device mesh of one dimension.
        conv1d_kernel_size: taps of a convolution that uses the context.
        cu_seqlens_cpu: a copy on the host, which saves a synchronisation.
        lengths: tokens of each rank's slice, which may be 0; None cuts as equally as possible.

    Raises:
        ValueError: the number of lengths is not that of the ranks, or their sum not that of the
            tokens.
    """
    group = group.get_group() if hasattr(group, "get_group") else group
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    bounds = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    if lengths is None:
        share, rest = divmod(bounds[-1], world)
        lengths = [share + (r < rest) for r in range(world)]
    if len(lengths) != world or sum(lengths) != bounds[-1] or min(lengths) < 0:
        raise ValueError(
            f"lengths must be {world} numbers, one for each rank, with the sum {bounds[-1]}, the "
            f"tokens of cu_seqlens; got {list(lengths)}"
        )
    local, before, after, halo = locate(bounds, lengths, rank)
    host = torch.tensor(local, dtype=torch.int32)
    return SequenceContext(
        group,
        host.to(cu_seqlens.device),
        host,
        tuple(lengths),
        before,
        after,
        halo,
        conv1d_kernel_size,
    )


def locate(
    bounds: Sequence[int], lengths: Sequence[int], rank: int
) -> tuple[list[int], int, int, int]:
    """Return a slice's bounds, ranks before and after, and its first sequence's earlier tokens.

    Args:
        bounds: the bounds of all sequences.
        lengths: the tokens of all slices.
        rank: the slice's rank.
    """
    edges = [0, *itertools.accumulate(lengths)]
    begin, end = edges[rank : rank + 2]
    if begin == end:  # an empty slice within a sequence passes the sequence's state on
        pieces = [(a, b) for a, b in itertools.pairwise(bounds) if a < begin < b]
    else:
        pieces = [(a, b) for a, b in itertools.pairwise(bounds) if max(a, begin) < min(b, end)]
    if not pieces:
        return [0, 0], 0, 0, 0
    start, stop = pieces[0][0], pieces[-1][1]
    local = [0, *(min(b, end) - begin for _, b in pieces)]

    def rank_of(token: int) -> int:
        return bisect.bisect_right(edges, token) - 1

    return local, rank - rank_of(start), rank_of(stop - 1) - rank, max(0, begin - start)


def expect_one_row(x: Any) -> None:
    """Raise ValueError if a tensor of a call with a cp_context has more than one row."""
    if x.shape[0] != 1:
        raise ValueError(
            f"with a cp_context, sequences are packed in one row; got {x.shape[0]} rows: flatten "
            "them and give their bounds to build_cp_context"
        )


def place_of(context: Any, tokens: int) -> Place:
    """Return the place of a call with `tokens` tokens; `context` is this module's or fla's.

    Raises:
        ValueError: the context's layout is not contiguous slices, it has no group, or its slice has
            another number of tokens.
    """
    if getattr(context, "layout", "contiguous") != "contiguous":
        raise ValueError(f"cp_context has layout {context.layout!r}: build it as 'contiguous'")
    if context.group is None or context.cu_seqlens is None:
        raise ValueError("cp_context needs a group and cu_seqlens: make it by build_cp_context")
    host = context.cu_seqlens if context.cu_seqlens_cpu is None else context.cu_seqlens_cpu
    bounds = tuple(host.tolist())
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise ValueError(f"cp_context is of {bounds[-1]} tokens on this rank; got {tokens}")
    lengths = getattr(context, "lengths", (tokens,))
    before, after = context.pre_num_ranks, context.post_num_ranks
    return Place(context.group, dist.get_rank(context.group), bounds, before, after, max(lengths))


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
