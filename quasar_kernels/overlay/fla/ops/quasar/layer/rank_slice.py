"""The layer over the ranks of a process group, each with a slice of one row of packed sequences.

The operator exchanges its states. The convolution of a slice's first tokens also needs the last
inputs of earlier ranks, the halo. These few tokens are computed a second time, with the halo, and
replace the results of the large kernels. Their gradients pass through this second computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fla.ops.quasar.device import once_differentiable
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.first_tokens import replace_halo_tokens
from fla.ops.quasar.layer.gradients import launch_conv_silu_grad
from fla.ops.quasar.layer.products import product_in
from fla.ops.quasar.parallel.chunks import slice_backward, slice_forward
from fla.ops.quasar.parallel.context import Place, place_of
from fla.ops.quasar.parallel.exchange import gather
from fla.ops.quasar.operator_types import Gradients, Saved, Scan, ScanInputs
from fla.ops.quasar.switches import Backend


class RankSlice:
    """The exchanges with other ranks in one call of the layer on this rank's slice.

    Args:
        context: from `build_cp_context`.
        tokens: number of tokens of this rank's slice.
        taps: number of taps of the convolution, 1 for none.
    """

    def __init__(self, context: Any, tokens: int, taps: int) -> None:
        self.context = context
        self.place: Place = place_of(context, tokens)
        self.bounds: torch.Tensor | None = None
        """Bounds of the slice's sequences on the host, `[n + 1]`; None for one sequence."""
        if len(self.place.bounds) > 2:
            self.bounds = context.cu_seqlens_cpu
        ranks = torch.distributed.get_world_size(self.place.group)
        lengths = getattr(context, "lengths", (tokens,) * ranks)
        self._rows = [min(length, taps - 1) for length in lengths]  # rows that each rank provides
        self._before = taps - 1  # tokens before a token that its convolution reads
        self._halo_rows = min(taps - 1, context.pre_num_conv_tokens) if self.place.before else 0
        self._first_tokens = min(self._before, self.place.bounds[1]) if self._halo_rows else 0
        self._G: Any = None  # after `forward` with `save`
        self.halo: Any = None  # [rows, hidden], from `gather_halo` or `exchange_halo`
        self.final: torch.Tensor | None = None  # the operator's states, after `forward`
        # after `take_first_gradients`: rows of the halo and the first inputs, and their gradients
        self._first: Any = None
        self._d_halo: Any = None  # [rows, hidden]

    def gather_halo(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs `[rows, hidden]` before x `[1, T, hidden]` of x's first sequence.

        All ranks must call it.
        """
        if not self._before:
            return x[0, :0]
        rank, own = self.place.rank, x[0, x.shape[1] - self._rows[self.place.rank] :]
        if own.shape[0] < self._before:
            own = F.pad(own, (0, 0, self._before - own.shape[0], 0))
        gathered = gather(own, self.place.group)
        if not self._halo_rows:
            return x[0, :0]
        if self._rows[rank - 1] >= self._halo_rows:
            return gathered[rank - 1, self._before - self._halo_rows :]
        before = range(rank - self.place.before, rank)
        rows = torch.cat([gathered[n, self._before - self._rows[n] :] for n in before])
        return rows[rows.shape[0] - self._halo_rows :]

    def return_halo(self, d_halo: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients `[rows, hidden]` of this rank's rows in later halos.

        All ranks must call it.
        """
        rank, reach = self.place.rank, self._before
        if not reach:
            return d_halo
        own = F.pad(d_halo, (0, 0, reach - d_halo.shape[0], 0))
        gathered = gather(own, self.place.group)
        total = torch.zeros_like(own)
        between = 0  # rows of the ranks between this one and n
        for n in range(rank + 1, rank + self.place.after + 1):
            if between < reach:
                total[between:] += gathered[n, : reach - between]
            between += self._rows[n]
        return total[reach - self._rows[rank] :]

    def exchange_halo(self, x: torch.Tensor) -> None:
        """Set `halo`, with gradients for autograd; all ranks must call it."""
        self.halo = HaloFunction.apply(self, x)

    def with_halo(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Return the halo followed by x, their sequences' bounds, and the halo's number of rows."""
        rows, bounds = self.halo.shape[0], self.bounds
        if bounds is not None:
            bounds = F.pad(bounds[1:] + rows, (1, 0))
        return torch.cat([self.halo.unsqueeze(0), x], 1), bounds, rows

    def replace_first_tokens(
        self, call: Call, x: torch.Tensor, weights: Weights, scan: ScanInputs
    ) -> None:
        """Replace q, k and v of the first tokens by those computed with the halo."""
        if self._first_tokens:
            rows = torch.cat([self.halo, x[0, : self._first_tokens]])
            replace_halo_tokens(call, rows, weights, self._halo_rows, scan[:3])

    def forward(self, scan: ScanInputs, backend: Backend, save: bool) -> Scan:
        """Run the operator on this rank's slice; `save` is whether `backward` follows."""
        results = slice_forward(self.place, scan, True, backend)
        self.final = results.final_state
        if save:
            self._G = results.later_G(self.place)
        return Scan(results.o, None, results.saved)

    def backward(self, saved: Saved, do: torch.Tensor) -> Gradients:
        """Run the operator's backward pass, after `forward`."""
        return slice_backward(self.place, saved, self._G, do, None)

    def take_first_gradients(
        self,
        x: torch.Tensor,
        projections: torch.Tensor,
        weights: Weights,
        d_qkv: Sequence[torch.Tensor],
    ) -> None:
        """Compute the gradients through the second computation of the first tokens.

        Sets these tokens' gradients in `d_qkv` to zero. `add_first_gradients`,
        `add_halo_projections` and `exchange_halo_gradients` add the results.

        Args:
            x: `[1, T, hidden]`, the slice's inputs.
            projections: `[3 H S, hidden]`, of q, k and v, in the products' dtype.
            weights: the layer's.
            d_qkv: three tensors `[1, T, H, S]`.
        """
        self._d_halo = torch.zeros_like(self.halo)
        if not self._first_tokens:
            return
        rows = torch.cat([self.halo, x[0, : self._first_tokens]]).to(projections.dtype)
        products = F.linear(rows, projections)
        d_first = [d[0, : self._first_tokens].flatten(1) for d in d_qkv]
        d_first = [F.pad(d, (0, 0, self._halo_rows, 0)) for d in d_first]
        for d in d_qkv:
            d[0, : self._first_tokens] = 0
        d_products = torch.empty_like(products)
        d_conv = launch_conv_silu_grad(
            products, *weights.joined_taps(), None, tuple(d_first), d_products
        )
        self._d_halo = product_in(d_products[: self._halo_rows], projections, x.dtype)
        self._first = rows, d_products, *d_conv

    def add_first_gradients(
        self, d_products: torch.Tensor, d_taps: torch.Tensor, d_shift: torch.Tensor
    ) -> None:
        """Add the first tokens' gradients to those of the products and of the convolution."""
        if self._first_tokens:
            _, d_first, *d_conv = self._first
            d_products[: self._first_tokens, : d_first.shape[1]] += d_first[self._halo_rows :]
            d_taps += d_conv[0]
            d_shift += d_conv[1]

    def add_halo_projections(self, d_projections: torch.Tensor) -> None:
        """Add the halo's part to the projections' gradient `[at least 3 H S, hidden]`."""
        if self._first_tokens:
            rows, d_first = (each[: self._halo_rows].float() for each in self._first[:2])
            d_projections[: d_first.shape[1]].addmm_(d_first.t(), rows)

    def exchange_halo_gradients(self, dx: torch.Tensor) -> None:
        """Add later halos' gradients of x's rows to dx `[1, T, hidden]`; all ranks must call it."""
        returned = self.return_halo(self._d_halo)
        dx[0, dx.shape[1] - returned.shape[0] :] += returned


class HaloFunction(torch.autograd.Function):
    """`RankSlice.gather_halo` for autograd: a rank receives the gradients of rows that it sent."""

    @staticmethod
    def forward(ctx: Any, rank: RankSlice, x: torch.Tensor) -> torch.Tensor:
        """Return the halo `[rows, hidden]` of x `[1, T, hidden]`."""
        ctx.rank, ctx.shape = rank, x.shape
        return rank.gather_halo(x).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_halo: torch.Tensor) -> Any:
        """Return x's gradient."""
        dx = d_halo.new_zeros(ctx.shape)
        returned = ctx.rank.return_halo(d_halo)
        dx[0, dx.shape[1] - returned.shape[0] :] = returned
        return None, dx


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
