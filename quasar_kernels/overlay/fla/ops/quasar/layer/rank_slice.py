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
from fla.ops.quasar.layer.first_tokens import project_rows, replace_halo_tokens
from fla.ops.quasar.parallel.chunks import slice_backward, slice_forward
from fla.ops.quasar.parallel.context import Place, place_of
from fla.ops.quasar.parallel.exchange import gather
from fla.ops.quasar.operator_types import Gradients, Saved, Scan, ScanInputs
from fla.ops.quasar.switches import Backend


class RankSlice:
    """The exchanges of one call of the layer on a slice with the other ranks.

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
        self.first_gradients: Any = None  # those through the halo, after `take_first_gradients`

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
        """Return the gradient `[rows, hidden]` of this rank's last inputs from later ranks' halos.

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
        """Return x after the halo, the bounds of its sequences, and the number of rows before x."""
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
        self, call: Call, x: torch.Tensor, weights: Weights, d_qkv: Sequence[torch.Tensor]
    ) -> None:
        """Remove the first tokens' gradients from `d_qkv` and propagate them with the halo.

        `first_gradients` becomes those of the halo `[rows, hidden]`, of the first inputs, and of
        the weights.
        """
        if not self._first_tokens:
            self.first_gradients = self.halo, x[0, :0], [None] * len(weights)
            return
        d_first_qkv = [d[0, : self._first_tokens].flatten(1).clone() for d in d_qkv]
        for d in d_qkv:
            d[0, : self._first_tokens] = 0
        with torch.enable_grad():
            rows = torch.cat([self.halo, x[0, : self._first_tokens]]).detach().requires_grad_()
            leaves = Weights(*(w if w is None else w.detach().requires_grad_() for w in weights))
            first_qkv = project_rows(call, rows, leaves)[-self._first_tokens :].chunk(3, dim=1)
        present = [rows, *(w for w in leaves if w is not None)]
        d_rows, *d_present = torch.autograd.grad(first_qkv, present, d_first_qkv, allow_unused=True)
        remaining = iter(d_present)
        d_weights = [None if w is None else next(remaining) for w in leaves]
        self.first_gradients = *d_rows.split([self._halo_rows, self._first_tokens]), d_weights

    def add_first_gradients(self, dx: torch.Tensor, d_weights: list[torch.Tensor | None]) -> None:
        """Add the gradients that pass through the halo; all ranks must call it.

        Args:
            dx: `[1, T, hidden]`, changed in place.
            d_weights: in the order of `Weights`, None for those not needed; entries are replaced.
        """
        d_halo, d_first, d_first_weights = self.first_gradients
        dx[0, : d_first.shape[0]] += d_first
        returned = self.return_halo(d_halo)
        dx[0, dx.shape[1] - returned.shape[0] :] += returned
        for n, (d, more) in enumerate(zip(d_weights, d_first_weights, strict=True)):
            if d is not None and more is not None:
                d_weights[n] = d + more


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
