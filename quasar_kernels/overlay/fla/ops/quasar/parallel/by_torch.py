"""A rank's slice in torch: for CPU tensors, and for calls that the CUDA kernels do not support.

A slice maps the state X that enters its last sequence to G X + R. One call computes R and G: for
values [v | 0] and the initial state [X0 | I], the final state is [R | G]. X0 is zero if the
sequence begins on an earlier rank. Otherwise X0 is its initial state, and no rank uses G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fla.ops.quasar.chunk_torch import chunk_quasar_torch
from fla.ops.quasar.parallel.context import Place
from fla.ops.quasar.parallel.exchange import entering_state, leaving_gradient, pack_map, unpack_maps
from fla.ops.quasar.operator_types import Gradients, Saved, ScanInputs


class TorchSlice:
    """The forward pass of a slice.

    `run` sets `o` and `final`, and stores in `inputs` the states from which it starts.

    Args:
        inputs: one row, B = 1; q and k may have fewer heads than v.
        place: the slice's place.
    """

    o: torch.Tensor  # [1, T, H, V]
    final: torch.Tensor  # [sequences, H, K, V]
    _packed_map: torch.Tensor

    def __init__(self, inputs: ScanInputs, place: Place) -> None:
        self.inputs, self._place = inputs, place
        self._done = False

    def compute_map(self) -> torch.Tensor:
        """Return the packed map (`pack_map`) of the slice's last sequence.

        The second round needs the map of the first one: `run` has replaced the initial state.
        """
        if self._done:
            return self._packed_map
        x = self.inputs.with_equal_heads()
        last = slice(*self._place.bounds[-2:])
        k, v = x.k[:, last], x.v[:, last]
        H, K, V = k.shape[2], k.shape[3], v.shape[3]
        dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        state = torch.zeros(1, H, K, V + K, dtype=dtype, device=k.device)
        if x.initial_state is not None:
            state[..., :V] = x.initial_state[-1]
        state[..., V:] = torch.eye(K, device=k.device)
        steps, per_token = x.steps
        _, final = chunk_quasar_torch(
            k,
            k,
            F.pad(v, (0, K)),
            steps[:, last] if per_token else steps,
            state,
            True,
            g=None if x.g is None else x.g[:, last],
        )
        R, G = final[0].split([V, K], -1)
        self._packed_map = pack_map(G, R, G.new_zeros(H))
        return self._packed_map

    def run(self, all_maps: torch.Tensor) -> None:
        """Compute the outputs from the packed maps of all ranks.

        The caller makes a second round for long slices on a GPU. Only `CudaSlice` needs it, so a
        second call does nothing here.
        """
        if self._done:
            return
        self._done = True
        q, (H, V), K = self.inputs.q, self.inputs.v.shape[2:], self.inputs.q.shape[-1]
        _, rank, bounds, before, *_ = self._place
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        initial = torch.zeros(len(bounds) - 1, H, K, V, dtype=dtype, device=q.device)
        if self.inputs.initial_state is not None:
            initial.copy_(self.inputs.initial_state)
        entering = entering_state(unpack_maps(all_maps, H, K, V), rank, before)
        if entering is not None:
            initial[0] = entering
        self.inputs = self.inputs._replace(initial_state=initial)
        self.o, self.final = _run(self.inputs, bounds)

    def saved(self) -> Saved:
        """Return the tensors that `TorchGradient` needs."""
        return Saved(self.inputs, None, None, None)


class TorchGradient:
    """The backward pass of a slice, from the `saved` tensors of a `TorchSlice`.

    It computes the slice again. `compute_offset` runs the backward pass without the gradient from
    later ranks, and `run` with it.
    """

    def __init__(
        self, saved: Saved, place: Place, do: torch.Tensor, d_final: torch.Tensor | None
    ) -> None:
        q, k, v, (steps, _), initial, _, scale, g = saved.inputs
        leaves = [q, k, v, steps, initial, g]
        self._leaves = [None if x is None else x.detach().requires_grad_() for x in leaves]
        *tensors, g = self._leaves
        inputs = ScanInputs.of(*tensors, scale=scale, g=g)
        with torch.enable_grad():
            self._results = _run(inputs, place.bounds)
        self._place = place
        final = self._results[1]
        self._incoming = [do, torch.zeros_like(final) if d_final is None else d_final.to(final)]

    def compute_offset(self) -> torch.Tensor:
        """Return the gradient `[H, K, V]` of the state before the slice, without later ranks."""
        initial: Any = self._leaves[4]
        (gradient,) = torch.autograd.grad(
            self._results, [initial], self._incoming, retain_graph=True
        )
        return gradient[0]

    def overlap(self) -> None:
        """Do nothing; `CudaSliceGradient` has work here that does not depend on other ranks."""

    def run(self, G: torch.Tensor, offsets: torch.Tensor) -> Gradients:
        """Return the gradients.

        Args:
            G: `[after - 1, H, K, K]`, the G of the later ranks onto which the last sequence
                continues, but not of the rank where it ends. `after` is `Place.after`.
            offsets: `[ranks, H, K, V]`, the results of `compute_offset` on all ranks.
        """
        do, d_final = self._incoming
        leaving = leaving_gradient(G, offsets, self._place.rank, self._place.after)
        if leaving is not None:
            d_final = d_final.clone()
            d_final[-1] += leaving
        present = [x for x in self._leaves if x is not None]
        gradients = iter(
            torch.autograd.grad(
                self._results, present, [do, d_final], allow_unused=True, materialize_grads=True
            )
        )
        return Gradients(*(None if x is None else next(gradients) for x in self._leaves))


def _run(inputs: ScanInputs, bounds: Sequence[int]) -> Any:
    x = inputs.with_equal_heads()
    cu_seqlens = torch.tensor(bounds)
    return chunk_quasar_torch(
        *x[:3], x.steps.values, x.initial_state, True, cu_seqlens, scale=x.scale, g=x.g
    )


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
