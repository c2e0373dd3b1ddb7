"""Splits or pads values that are wider or narrower than the keys.

The kernels need values as wide as keys. The columns of the state are independent of one another,
so wide values are split into several heads with the same keys, and narrow values are padded with
zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Heads(NamedTuple):
    """The shape of a call's heads."""

    width: int  # of keys, K
    values: int  # of values, V
    square: bool  # whether values must be as wide as keys

    @property
    def parts(self) -> int:
        """The number of heads into which one head of values is split."""
        return -(-self.values // self.width) if self.square else 1

    def scalars(self, x: Tensor) -> Tensor:
        """Repeat beta or g `[B, T, HV]` for the heads that `cut` returns."""
        return x if self.parts == 1 else x.repeat_interleave(self.parts, 2)

    def cut(self, v: Tensor) -> Tensor:
        """Split v `[B, T, HV, V]` into heads as wide as keys."""
        if not self.square or self.values == self.width:
            return v
        v = F.pad(v, (0, self.parts * self.width - self.values))
        return v.reshape(*v.shape[:2], v.shape[2] * self.parts, self.width)

    def joined(self, o: Tensor) -> Tensor:
        """Join the results of `cut` values to `[B, T, HV, V]`."""
        if not self.square or self.values == self.width:
            return o
        width = self.parts * self.width
        return o.reshape(*o.shape[:2], o.shape[2] // self.parts, width)[..., : self.values]

    def cut_state(self, state: Tensor) -> Tensor:
        """Split states `[N, HV, K, V]` like their values."""
        if not self.square or self.values == self.width:
            return state
        state = F.pad(state, (0, self.parts * self.width - self.values))
        state = state.reshape(*state.shape[:3], self.parts, self.width)
        return state.transpose(2, 3).flatten(1, 2)

    def joined_state(self, state: Tensor) -> Tensor:
        """Join split states to `[N, HV, K, V]`."""
        if not self.square or self.values == self.width:
            return state
        heads = state.shape[1] // self.parts
        state = state.reshape(state.shape[0], heads, self.parts, self.width, self.width)
        state = state.transpose(2, 3)
        return state.flatten(3, 4)[..., : self.values]
