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

from fla.ops.quasar.device import on_its_device, once_differentiable
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.first_tokens import project_rows, replace_halo_tokens
from fla.ops.quasar.layer.forward import layer_forward
from fla.ops.quasar.layer.node import layer_gradients
from fla.ops.quasar.layer.products import product_in
from fla.ops.quasar.parallel.chunks import slice_backward, slice_forward
from fla.ops.quasar.parallel.context import Place, place_of
from fla.ops.quasar.parallel.exchange import gather
from fla.ops.quasar.scan import Gradients, Saved, Scan, ScanInputs
from fla.ops.quasar.switches import Backend


class Neighbours:
    """The exchanges of one call of the layer with other ranks.

    Args:
        context: from `build_cp_context`.
        tokens: number of tokens of this rank's slice.
        taps: number of taps of the convolution, 1 for none.
    """

    def __init__(self, context: Any, tokens: int, taps: int) -> None:
        self.place: Place = place_of(context, tokens)
        ranks = torch.distributed.get_world_size(self.place.group)
        lengths = getattr(context, "lengths", (tokens,) * ranks)
        self._rows = [min(length, taps - 1) for length in lengths]  # rows that each rank provides
        self._most = taps - 1
        self._halo = min(taps - 1, context.pre_num_conv_tokens) if self.place.before else 0  # rows
        self._first = min(self._most, self.place.bounds[1]) if self._halo else 0  # tokens
        self._G: Any = None  # after `forward`
        self.halo: Any = None  # [rows, hidden]; set by the caller of `gather_halo`
        self.final: torch.Tensor | None = None  # the operator's states, after `forward`

    def gather_halo(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs `[rows, hidden]` before x `[1, T, hidden]` of x's first sequence.

        All ranks must call it.
        """
        if not self._most:
            return x[0, :0]
        rank, own = self.place.rank, x[0, x.shape[1] - self._rows[self.place.rank] :]
        if own.shape[0] < self._most:
            own = F.pad(own, (0, 0, self._most - own.shape[0], 0))
        gathered = gather(own, self.place.group)
        if not self._halo:
            return x[0, :0]
        if self._rows[rank - 1] >= self._halo:
            return gathered[rank - 1, self._most - self._halo :]
        before = range(rank - self.place.before, rank)
        rows = torch.cat([gathered[n, self._most - self._rows[n] :] for n in before])
        return rows[rows.shape[0] - self._halo :]

    def return_halo(self, d_halo: torch.Tensor) -> torch.Tensor:
        """Return the gradient `[rows, hidden]` of this rank's last inputs from later ranks' halos.

        All ranks must call it.
        """
        rank, most = self.place.rank, self._most
        if not most:
            return d_halo
        own = F.pad(d_halo, (0, 0, most - d_halo.shape[0], 0))
        gathered = gather(own, self.place.group)
        total = torch.zeros_like(own)
        between = 0  # rows of the ranks between this one and n
        for n in range(rank + 1, rank + self.place.after + 1):
            if between < most:
                total[between:] += gathered[n, : most - between]
            between += self._rows[n]
        return total[most - self._rows[rank] :]

    def correct(self, call: Call, x: torch.Tensor, weights: Weights, scan: ScanInputs) -> None:
        """Replace q, k and v of the first tokens by those computed with the halo."""
        if self._first:
            rows = torch.cat([self.halo, x[0, : self._first]])
            replace_halo_tokens(call, rows, weights, self._halo, scan[:3])

    def forward(self, scan: ScanInputs, backend: Backend) -> Scan:
        """Run the operator on this rank's slice."""
        o, self.final, saved, self._G = slice_forward(self.place, scan, True, backend)
        return Scan(o, None, saved)

    def backward(self, saved: Saved, do: torch.Tensor) -> Gradients:
        """Run the operator's backward pass, after `forward`."""
        return slice_backward(self.place, saved, self._G, do, None)

    def first_gradients(
        self,
        call: Call,
        x: torch.Tensor,
        weights: Weights,
        d_qkv: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
        """Remove the first tokens' gradients from `d_qkv` and propagate them with the halo.

        Returns:
            The gradients of the halo `[rows, hidden]`, of the first inputs, and of the weights.
        """
        if not self._first:
            return self.halo, x[0, :0], [None] * len(weights)
        d_first_qkv = [d[0, : self._first].flatten(1).clone() for d in d_qkv]
        for d in d_qkv:
            d[0, : self._first] = 0
        with torch.enable_grad():
            rows = torch.cat([self.halo, x[0, : self._first]]).detach().requires_grad_()
            leaves = Weights(*(w if w is None else w.detach().requires_grad_() for w in weights))
            first_qkv = project_rows(call, rows, leaves)[-self._first :].chunk(3, dim=1)
        present = [rows, *(w for w in leaves if w is not None)]
        d_rows, *d_present = torch.autograd.grad(first_qkv, present, d_first_qkv, allow_unused=True)
        remaining = iter(d_present)
        d_weights = [None if w is None else next(remaining) for w in leaves]
        d_halo, d_first = d_rows.split([self._halo, self._first])
        return d_halo, d_first, d_weights


class HaloFunction(torch.autograd.Function):
    """`Neighbours.gather_halo` for autograd: a rank receives the gradients of rows that it sent."""

    @staticmethod
    def forward(ctx: Any, neighbours: Neighbours, x: torch.Tensor) -> torch.Tensor:
        """Return the halo `[rows, hidden]` of x `[1, T, hidden]`."""
        ctx.neighbours, ctx.shape = neighbours, x.shape
        return neighbours.gather_halo(x).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_halo: torch.Tensor) -> Any:
        """Return x's gradient."""
        dx = d_halo.new_zeros(ctx.shape)
        returned = ctx.neighbours.return_halo(d_halo)
        dx[0, dx.shape[1] - returned.shape[0] :] = returned
        return None, dx


class ParallelLayer(torch.autograd.Function):
    """Saves x, its halo and the weights; the backward pass computes the layer again."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, neighbours: Neighbours, x: torch.Tensor, *weights: Any
    ) -> torch.Tensor:
        """Compute the layer of this rank's slice, x `[1, T, hidden]`."""
        neighbours.halo = neighbours.gather_halo(x)
        ctx.call, ctx.neighbours = call, neighbours
        ctx.save_for_backward(x, *weights)
        y: torch.Tensor = layer_forward(call, x, Weights(*weights), across=neighbours).y
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Return the gradients of `forward`'s arguments."""
        return _backward(ctx, dy)


@once_differentiable
@on_its_device
def _backward(ctx: Any, dy: torch.Tensor) -> Any:
    x, *tensors = ctx.saved_tensors
    call, weights, neighbours = ctx.call, Weights(*tensors), ctx.neighbours
    first_gradients: list[Any] = []
    needed = [True, *ctx.needs_input_grad[3:]]
    with torch.autocast(dy.device.type, enabled=False):
        d_weights, factors = layer_gradients(
            call, x, weights, None, dy, needed, across=neighbours, first=first_gradients
        )
        dx = product_in(*factors, x.dtype).view(x.shape)
        d_halo, d_first, d_first_weights = first_gradients
        dx[0, : d_first.shape[0]] += d_first
        returned = neighbours.return_halo(d_halo)
        dx[0, x.shape[1] - returned.shape[0] :] += returned
        for n, (d, more) in enumerate(zip(d_weights, d_first_weights, strict=True)):
            if d is not None and more is not None:
                d_weights[n] = d + more
    return None, None, dx, *d_weights


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
