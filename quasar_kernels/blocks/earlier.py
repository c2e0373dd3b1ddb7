"""The tokens before each token, across calls and within packed sequences."""

from __future__ import annotations

import torch
from fla.ops.quasar.arguments import check_bounds, expect
from fla.ops.quasar.chunk_torch import sequence_lengths
from fla.ops.quasar.layer.kernels import causal_conv_silu
from fla.ops.quasar.layer.library import positions
from fla.ops.quasar.layer.wrapped import convolve_by
from torch import Tensor, nn


class Earlier:
    """The tokens up to `reach` places before each token of a call.

    Args:
        x: `[B, T, C]`, the inputs of the call's tokens.
        before: `[N, reach, C]`, the inputs before each sequence's first token; None is zeros.
        reach: the largest distance in tokens.
        cu_seqlens: `[N + 1]` bounds of sequences packed in one row (B = 1).

    Raises:
        ValueError: the bounds `cu_seqlens` do not fit one row of T tokens, or `before` has another
            number of sequences.
    """

    def __init__(
        self, x: Tensor, before: Tensor | None, reach: int, cu_seqlens: Tensor | None
    ) -> None:
        B, T, C = x.shape
        check_bounds(cu_seqlens, B)
        lengths = [T] if cu_seqlens is None else sequence_lengths(cu_seqlens, B, T)
        rows = B if cu_seqlens is None else 1
        if before is not None:
            expect("the state's `before`", before, (rows * len(lengths), reach, C), x.device)
        self._x, self._reach, self._bounds = x, reach, cu_seqlens
        self._fresh = before is None
        starts = x.new_zeros(rows * len(lengths), reach, C) if before is None else before
        self._empty = x[:, :0], starts[:0].to(x.dtype)
        # (tokens before the call, tokens of it) per packed sequence, or for all rows at once
        self._parts = list(zip(starts.to(x.dtype).split(rows), x.split(lengths, 1), strict=True))

    def shifted(self, distance: int) -> Tensor:
        """Return the token `distance` places before each token, `[B, T, C]`."""
        parts = []
        for start, tokens in self._parts:
            T = tokens.shape[1]
            near = start[:, self._reach - distance :][:, :T]
            parts.append(torch.cat([near, tokens[:, : max(0, T - distance)]], dim=1))
        return parts[0] if len(parts) == 1 else torch.cat([self._empty[0], *parts], dim=1)

    def convolved(self, taps: Tensor, bias: Tensor | None) -> Tensor:
        """Return SiLU of the causal depthwise convolution, `[B, T, C]`; taps: `[C, reach + 1]`."""
        x = self._x
        if self._fresh:
            B, T, C = x.shape
            place = positions(B, T, self._bounds, x.device)
            return causal_conv_silu(x.reshape(B * T, C), taps, bias, place).view(B, T, C)
        parts = []
        for start, tokens in self._parts:
            whole = torch.cat([start, tokens], dim=1)
            B, T, C = whole.shape
            y = causal_conv_silu(whole.view(B * T, C), taps, bias, None if B == 1 else T)
            parts.append(y.view(B, T, C)[:, self._reach :])
        return torch.cat([self._empty[0], *parts], dim=1)

    def convolved_by(self, module: nn.Module) -> Tensor:
        """Return the same as `convolved` by calling the convolution's module."""
        parts = [torch.cat([start, tokens], dim=1).mT for start, tokens in self._parts]
        return convolve_by(module, parts, self._reach).mT if parts else self._empty[0]

    def last(self) -> Tensor:
        """Return the last tokens of each sequence, `[N, reach, C]`, for the next call."""
        ends = []
        for start, tokens in self._parts:
            T = tokens.shape[1]
            kept = start[:, min(T, self._reach) :]
            ends.append(torch.cat([kept, tokens[:, max(0, T - self._reach) :]], dim=1))
        return torch.cat([self._empty[1], *ends])
