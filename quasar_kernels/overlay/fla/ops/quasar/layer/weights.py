"""The layer's weights by name."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Weights(NamedTuple):
    """The layer's weights, in the order in which they are passed through autograd.

    H heads of S channels; None for weights that a layer does not have.
    """

    q: torch.Tensor  # [H S, hidden], as k and v
    k: torch.Tensor
    v: torch.Tensor
    narrow: torch.Tensor  # [S, hidden], the gate's narrow half
    wide: torch.Tensor  # [H S, S], its wide half
    wide_bias: torch.Tensor  # [H S]
    q_taps: torch.Tensor | None  # [H S, 1, taps], of the convolutions
    k_taps: torch.Tensor | None
    v_taps: torch.Tensor | None
    q_shift: torch.Tensor | None  # [H S], the convolutions' biases
    k_shift: torch.Tensor | None
    v_shift: torch.Tensor | None
    beta_log: torch.Tensor  # [H]
    norm: torch.Tensor  # [S]
    out: torch.Tensor  # [hidden, H S]

    def of_products(self) -> tuple[torch.Tensor, ...]:
        """Return the weights of the matrix products, as `concatenated` takes them."""
        return *self[:6], self.out

    def taps(self) -> tuple[torch.Tensor | None, ...]:
        """Return the taps of q, k and v."""
        return self.q_taps, self.k_taps, self.v_taps

    def joined_taps(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the convolutions' taps `[3 H S, taps]` and bias `[3 H S]` (or None), in a row."""
        shifts = self.q_shift, self.k_shift, self.v_shift
        taps = torch.cat(self.taps()).squeeze(1)  # type: ignore[arg-type] # they are there
        return taps, None if shifts[0] is None else torch.cat(shifts)  # type: ignore[arg-type]


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
