"""The inputs and results of the segmented scan, the same for each implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class StepSizes(NamedTuple):
    """alpha of each token, the factor of the token's update of the state."""

    values: torch.Tensor  # fp32 for the kernels
    per_token: bool
    """Whether `values` are alpha, `[B, T, H]`; otherwise they are beta `[H]`, and gate.py's formula
    gives alpha."""

    @classmethod
    def of(cls, beta: torch.Tensor) -> StepSizes:
        """Return the step sizes of a caller's `beta` `[H]` or `[B, T, H]`."""
        return cls(beta, beta.ndim == 3)


class ScanInputs(NamedTuple):
    """Inputs of the segmented scan of B rows of T tokens with H heads of S channels.

    The kernels take q, k and v in one dtype with a last stride of 1, and the others in fp32 and
    contiguous.
    """

    q: torch.Tensor  # [B, T, H, S]; with step sizes per token, several heads of v may share one
    k: torch.Tensor  # the same shape
    v: torch.Tensor  # [B, T, H, S]
    steps: StepSizes
    initial_state: torch.Tensor | None = None  # [sequences, H, S, S]; None is zero
    cu_seqlens: torch.Tensor | None = None  # [sequences + 1] bounds of packed sequences, B = 1
    scale: float = 1.0  # of the output
    g: torch.Tensor | None = None  # [B, T, H] log decays, not positive; with per-token steps only

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        beta: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> ScanInputs:
        """Return the inputs; `beta` `[H]` or `[B, T, H]` gives the step sizes (`StepSizes.of`)."""
        return cls(q, k, v, StepSizes.of(beta), *rest, **named)

    def with_equal_heads(self) -> ScanInputs:
        """Return the inputs with q and k repeated for the heads of v that share them."""
        q, k, v = self[:3]
        if q.shape[2] == v.shape[2]:
            return self
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return self._replace(q=q, k=k)


class Saved(NamedTuple):
    """The tensors of a forward pass that its backward pass needs."""

    inputs: ScanInputs  # as the kernels received them
    # [segments, H, S, S] fp32: the matrix of each segment's affine map (the kernels' `maps`);
    # None if each sequence is one segment
    G: torch.Tensor | None
    states: torch.Tensor | None  # the same shape: the state after each segment but the last
    segments: Any  # a `Segments`, or the `Plan` of the Triton kernels: how G and states are cut

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors, for autograd to save."""
        q, k, v, steps, initial_state, _, _, g = self.inputs
        return q, k, v, steps.values, initial_state, g, self.G, self.states

    @classmethod
    def of(cls, tensors: Sequence[Any], segments: Any, scale: float = 1.0) -> Saved:
        """Return the object from the tuple that its `tensors` returned."""
        q, k, v, beta, initial_state, g, G, states = tensors
        inputs = ScanInputs.of(q, k, v, beta, initial_state, scale=scale, g=g)
        return cls(inputs, G, states, segments)


class Scan(NamedTuple):
    """Results of the segmented scan."""

    o: torch.Tensor  # [B, T, H, S] contiguous, q's dtype
    final_state: torch.Tensor | None  # [sequences, H, S, S] fp32, if requested
    saved: Saved


class Gradients(NamedTuple):
    """Gradients of `ScanInputs`; the first three are in q's dtype."""

    q: torch.Tensor  # of v's shape by the CUDA kernels: one gradient for each head of v
    k: torch.Tensor  # as q
    v: torch.Tensor
    beta: torch.Tensor  # of `steps.values`, fp32
    initial_state: torch.Tensor | None  # [sequences, H, S, S] fp32, if there was one
    g: torch.Tensor | None  # [B, T, H] fp32, if there were log decays


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
