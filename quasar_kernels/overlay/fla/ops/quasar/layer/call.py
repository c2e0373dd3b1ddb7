"""A call of the layer: its settings, its weights, and the tensors between its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fla.ops.quasar.operator_types import Saved, Scan
from fla.ops.quasar.switches import Backend


class Call(NamedTuple):
    """A call's settings: everything but the input and the weights that determines the result."""

    heads: int
    head_dim: int
    eps: float  # added to the mean square in the norm
    dtype: torch.dtype  # of the matrix products
    cu_seqlens: torch.Tensor | None  # [N + 1] bounds of sequences packed in one row
    backend: Backend  # QUASAR_BACKEND's value; `torch` for CPU tensors
    recurrent: bool = False  # whether the operator processes one token after the other

    def sequences(self, x: torch.Tensor) -> int:
        """Return the number of sequences in the input x `[B, T, hidden]`."""
        return x.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1


class Weights(NamedTuple):
    """The layer's weights, in the order in which they are passed through autograd.

    H heads of S channels; None for weights that a layer does not have.
    """

    q: torch.Tensor  # [H S, hidden], as k and v
    k: torch.Tensor
    v: torch.Tensor
    gate_down: torch.Tensor  # [S, hidden], the gate's first projection
    gate_up: torch.Tensor  # [H S, S], its second one
    gate_bias: torch.Tensor  # [H S]
    q_taps: torch.Tensor | None  # [H S, 1, taps], of the convolutions
    k_taps: torch.Tensor | None
    v_taps: torch.Tensor | None
    q_shift: torch.Tensor | None  # [H S], the convolutions' biases
    k_shift: torch.Tensor | None
    v_shift: torch.Tensor | None
    beta_log: torch.Tensor  # [H]
    norm: torch.Tensor  # [S]
    out: torch.Tensor  # [hidden, H S]

    def taps(self) -> tuple[torch.Tensor | None, ...]:
        """Return the taps of q, k and v."""
        return self.q_taps, self.k_taps, self.v_taps

    def joined_taps(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the concatenated taps `[3 H S, taps]` and biases `[3 H S]` (or None)."""
        shifts = self.q_shift, self.k_shift, self.v_shift
        taps = torch.cat(self[6:9]).squeeze(1)  # type: ignore[arg-type] # the layer has them
        return taps, None if shifts[0] is None else torch.cat(shifts)  # type: ignore[arg-type]


@dataclass(slots=True)
class Projected:
    """The results of a call's first stage, for R tokens of H heads of S channels."""

    # [R, 3 H S], the operator's q, k and v; None once the operator has its views of it
    qkv: torch.Tensor | None
    beta: torch.Tensor  # [H] fp32, softplus(beta_log)
    narrow: torch.Tensor  # [R, S], x times `gate_down`
    output_weights: tuple[torch.Tensor, ...]  # as the same module's `output` reads them
    rows: torch.Tensor | None = None  # [R, hidden], x in the products' dtype, if saved
    products: torch.Tensor | None = None  # [R, 3 H S + S], x W: q, k, v and narrow, if saved


class Results(NamedTuple):
    """The layer's output, and its intermediate results; None for those not requested."""

    y: Any  # [B, T, hidden]
    rows: torch.Tensor | None = None  # as in `Projected`
    products: torch.Tensor | None = None
    narrow: torch.Tensor | None = None
    operator: Scan | None = None

    @classmethod
    def of(cls, saved: Sequence[Any], segments: Any) -> Results | None:
        """Return the results, without y, that an autograd node saved; None for an empty `saved`.

        Args:
            saved: `rows`, `products`, `narrow`, the operator's output, and `Saved.tensors`.
            segments: those of `Saved`.
        """
        if not saved:
            return None
        rows, products, narrow, o, *tensors = saved
        return cls(None, rows, products, narrow, Scan(o, None, Saved.of(tensors, segments)))


class States(NamedTuple):
    """The states of N sequences before or after a call; None is zero, or not requested."""

    conv: torch.Tensor | None = None  # [N, 3 H S, taps], the convolutions' last inputs
    operator: torch.Tensor | None = None  # [N, H, S, S] fp32 (fp64 for fp64 inputs)


NO_STATES = States()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
