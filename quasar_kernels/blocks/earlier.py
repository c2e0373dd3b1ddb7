"""The tokens before each token, over the borders of calls and of packed sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fla.ops.quasar.chunk_torch import sequence_lengths
from torch import Tensor


class Earlier:
    """Looks back by up to `reach` tokens.

    Args:
        x: `[B, T, C]`.
        before: `[N, reach, C]`, what came before each sequence's first token; None is zeros.
        reach: how far anything looks back.
        cu_seqlens: `[N + 1]` bounds of sequences packed in one row (B = 1).

    Raises:
        ValueError: `cu_seqlens` does not cut one row of T tokens.
    """

    def __init__(
        self, x: Tensor, before: Tensor | None, reach: int, cu_seqlens: Tensor | None
    ) -> None:
        B, T, C = x.shape
        self._lengths = [T] if cu_seqlens is None else sequence_lengths(cu_seqlens, B, T)
        self._rows = B if cu_seqlens is None else 1
        N = B if cu_seqlens is None else len(self._lengths)
        before = x.new_zeros(N, reach, C) if before is None else before.to(x.dtype)
        starts = before.split(self._rows)
        self._reach = reach
        self._parts = [
            torch.cat([start, part], dim=1)
            for start, part in zip(starts, x.split(self._lengths, 1), strict=True)
        ]
        self._empty = x[:, :0], before[:0]

    def by(self, distance: int) -> Tensor:
        """Return `[B, T, C]`: the token `distance` before each."""
        first = self._reach - distance
        rows = zip(self._parts, self._lengths, strict=True)
        return torch.cat(
            [self._empty[0], *(part[:, first : first + length] for part, length in rows)], dim=1
        )

    def convolved(self, taps: Tensor, bias: Tensor | None) -> Tensor:
        """Return the causal depthwise convolution by taps `[C, 1, reach + 1]`, `[B, T, C]`."""
        rows = [
            F.conv1d(part.mT, taps, bias, groups=taps.shape[0]).mT
            for part, length in zip(self._parts, self._lengths, strict=True)
            if length
        ]
        # rows have autocast's dtype where it is on, which nothing else may widen
        return torch.cat(rows, dim=1) if rows else self._empty[0]

    def last(self) -> Tensor:
        """Return `[N, reach, C]`: what comes before each sequence's next token."""
        ends = [part[:, part.shape[1] - self._reach :] for part in self._parts]
        return torch.cat([self._empty[1], *ends])
