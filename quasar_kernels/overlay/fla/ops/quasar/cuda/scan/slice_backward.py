"""The segmented scan of one rank's slice in CUDA C++: the backward pass around its exchange.

The kernels are those of scan_backward.py; only tables and launches differ. One table does not mark
the first segment as a sequence's first, so that state_gradient_map also computes the gradient of
the state before the slice.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from fla.ops.quasar.cuda.driver import PARAMETERS
from fla.ops.quasar.cuda.program import LoadedProgram, addresses
from fla.ops.quasar.cuda.scan import scan_backward
from fla.ops.quasar.cuda.scan.scan_forward import PANEL, SCAN_COLUMNS
from fla.ops.quasar.cuda.scan.slice_forward import fold_maps
from fla.ops.quasar.gate import divisible
from fla.ops.quasar.parallel.context import Place
from fla.ops.quasar.operator_types import Gradients, Saved


@functools.lru_cache(64)
def _bounds_of_one(segments: int, device: torch.device) -> torch.Tensor:
    """Return the bounds, in segments, of a scan over one sequence.

    The result is cached, because the host waits for the GPU when it copies the bounds to it.
    """
    return torch.tensor([0, segments], device=device)


class CudaSliceGradient:
    """The backward pass of a slice, as `TorchGradient`.

    `program` is scan_backward.py's, `maps_program` slice_forward.py's.
    """

    def __init__(
        self,
        saved: Saved,
        place: Place,
        d_o: torch.Tensor,
        d_final: torch.Tensor | None,
        program: LoadedProgram,
        maps_program: LoadedProgram,
    ) -> None:
        q, k, v, (steps, per_token), initial, *_, g = saved.inputs
        self._saved, self._program, self._cut = saved, program, saved.segments
        self._place, self._maps_program = place, maps_program
        self._d_o = d_o = d_o.clone() if d_o.data_ptr() % 16 else d_o
        self._steps = divisible(steps, q.dtype) if per_token else steps
        self._d_final = torch.zeros_like(initial) if d_final is None else d_final.clone()
        self._d_qkv = scan_backward.like_parts(d_o, (q, k, v))
        self._checkpoints = torch.empty_like(d_o)
        tiles = scan_backward.cut_tiles(self._cut.segments, v.shape[1], v.shape[3])
        self._rows, self._parts, self._tiles = tiles
        shape = steps.shape if per_token else (self._rows * self._parts, v.shape[2])
        self._d_beta = steps.new_empty(shape)
        self._d_decay = None if g is None else torch.empty_like(self._d_beta)
        self._d_initial = torch.empty_like(initial)
        self._d_states = initial.new_empty(self._cut.segments.total, *initial.shape[1:])
        tensors = {
            "q": q, "k": k, "v": v, "d_o": d_o, "dq": self._d_qkv[0], "dk": self._d_qkv[1],
            "dv": self._d_qkv[2], "checkpoints": self._checkpoints, "beta": self._steps,
            "initial_state": initial, "d_final": self._d_final, "maps": saved.G,
            "states": saved.states, "d_states": self._d_states, "d_initial": self._d_initial,
            "d_beta": self._d_beta, "d_decay": self._d_decay, "table": self._cut.segments.table,
            "first": self._cut.segments.first,
        }  # fmt: skip
        pointers = addresses(*tensors.values())
        self._pointers = dict(zip(tensors, pointers, strict=True))
        strides = tuple(x.stride()[:3] for x in (q, k, v, d_o))
        T, H = v.shape[1:3]
        group, scale = H // q.shape[2], saved.inputs.scale
        sizes = T, 0, *itertools.chain(*strides), 0, H, self._parts
        omits = self._cut.segments.longest >= scan_backward.LONG
        self._sizes = *sizes, scale, *addresses(g), group, omits
        self._maps = scan_backward.NO_MAPS
        if program.on_hopper:
            self._maps = scan_backward.gradient_maps(v.shape, group, pointers[:8], strides)

    def compute_offset(self) -> torch.Tensor:
        """Return the gradient `[H, S, S]` of the state before the slice, without later ranks."""
        count, G = self._cut.of_first, self._saved.G
        self._launch_map(self._cut.without_first, self._d_states)
        if count == 1 or G is None:
            return self._d_states[0]
        gradients = self._d_states[:count].clone()
        first = _bounds_of_one(count, gradients.device)
        self._launch_scan(1, self._parameters(d_states=gradients, first=first))
        later = gradients[1].double()
        return torch.baddbmm(gradients[0].double(), G[0].double().mT, later).float()

    def overlap(self) -> None:
        """Recompute the states, which do not depend on other ranks' gradients."""
        self._launch_walk("state_checkpoint", self._parameters())

    def run(self, G: torch.Tensor, offsets: torch.Tensor) -> Gradients:
        """Return the gradients; the arguments are `TorchGradient.run`'s."""
        cut, H = self._cut.segments, self._d_states.shape[1]
        after = self._place.after
        if after:
            leaving = torch.empty_like(offsets[0])
            size = leaving.numel()
            fold_maps(
                self._maps_program,
                leaving,
                G=G.data_ptr() + 4 * size * max(0, after - 2),
                R=offsets.data_ptr() + 4 * size * (self._place.rank + after),
                strides=(-size, -size),
                count=after,
                transposed=True,
            )
            self._d_final[-1] += leaving
            self._launch_map(cut.table[-1:], self._d_states[-1:])
        parameters = self._parameters()
        if self._saved.G is not None:
            self._launch_scan(cut.sequences, parameters)
        self._launch_walk("state_gradient", parameters)
        blocks = self._rows * self._parts * H
        self._launch("input_gradient", (blocks, 1), self._parameters(table=self._tiles))
        q, (dq, dk, dv) = self._saved.inputs.q, self._d_qkv
        if q.shape[2] != H:
            dq, dk = (x.unflatten(2, (q.shape[2], -1)).sum(3) for x in (dq, dk))
        per_token = self._saved.inputs.steps.per_token
        d_beta = self._d_beta if per_token else self._d_beta.sum(0)
        return Gradients(dq, dk, dv, d_beta, self._d_initial, self._d_decay)

    def _launch_map(self, table: torch.Tensor, d_states: torch.Tensor) -> None:
        """Write to `d_states` what each segment of the table adds to the state's gradient."""
        H, S = d_states.shape[1:3]
        parameters = self._parameters(table=table, d_states=d_states)
        self._launch("state_gradient_map", (table.shape[0] * H * (S // PANEL), 1), parameters)

    def _launch_scan(self, sequences: int, parameters: Any) -> None:
        H, S = self._d_states.shape[1:3]
        self._launch("gradient_scan", (sequences * H, S // SCAN_COLUMNS), parameters)

    def _launch_walk(self, kernel: str, parameters: Any) -> None:
        segments, H, S, _ = self._d_states.shape
        self._launch(kernel, (segments * H * (S // PANEL), 1), parameters)

    def _launch(self, kernel: str, grid: tuple[int, int], parameters: Any) -> None:
        self._program.kernels[kernel].launch(grid, parameters)

    def _parameters(self, **changes: torch.Tensor | None) -> Any:
        """Return a launch's parameters; `changes` replace tensors, by their field's name."""
        changed = zip(changes, addresses(*changes.values()), strict=True)
        pointers = self._pointers | dict(changed)
        packed = scan_backward.serialize(*pointers.values(), *self._sizes)
        return PARAMETERS(packed, self._maps)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
