"""The segmented scan of one rank's slice in CUDA C++: the forward pass, cut at its exchange.

The kernels are those of forward.py; only tables and launches differ. The last sequence of a slice
ends with a segment of less than a tile, so that all segments before it are whole tiles and have a
map. Two scans over these maps, from zero and from the identity, are the map of the slice.
"""

from __future__ import annotations

import ctypes
import functools
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda.program import LoadedProgram, addresses
from fla.ops.quasar.cuda.scan import forward
from fla.ops.quasar.cuda.scan.forward import LONG, PANEL, TILE
from fla.ops.quasar.parallel.exchange import SliceMap
from fla.ops.quasar.scan import Saved, ScanInputs, StepSizes
from fla.ops.quasar.segments import Segments

SCAN_COLUMNS = 8
"""State columns that a block of a scan owns."""


class SliceSegments(NamedTuple):
    """The segments of a slice."""

    segments: Segments
    of_first: int  # segments of the first sequence
    of_last: int  # of the last one, its tail included
    length: int  # tokens of a whole segment
    tail: int  # tokens of the tail
    without_first: torch.Tensor  # the table, where the first segment is like any other


@functools.lru_cache(64)
def slice_segments(
    bounds: tuple[int, ...], length: int, tile: int, device: torch.device
) -> SliceSegments:
    """Cut a slice's sequences into segments of `length` tokens, and cut off the last one's tail.

    The tail, the tokens behind the last whole tile, is a segment even if it is empty. Cached, since
    copying a table to a GPU waits for it.
    """
    table, first, tail = [], [0], 0
    for n, (start, stop) in enumerate(pairwise(bounds)):
        pieces = [(t, min(length, stop - t)) for t in range(start, stop, length)]
        if n == len(bounds) - 2:
            tail = (stop - start) % tile
            pieces = [(t, min(length, stop - tail - t)) for t in range(start, stop - tail, length)]
            pieces.append((stop - tail, tail))
        places = [0] * len(pieces)
        places[0] |= 1
        places[-1] |= 2
        table += [(n, *piece, place) for piece, place in zip(pieces, places, strict=True)]
        first.append(len(table))
    rows = torch.tensor(table, dtype=torch.int64, device=device)
    firsts = torch.tensor(first, dtype=torch.int64, device=device)
    longest = max(tokens for _, _, tokens, _ in table)
    segments = Segments(len(table), len(bounds) - 1, 0, 0, rows, firsts, longest)
    without_first = rows.clone()
    without_first[0, 3] &= ~1
    return SliceSegments(segments, first[1], first[-1] - first[-2], length, tail, without_first)


@functools.lru_cache(64)
def bounds_of_scans(*bounds: int, device: torch.device) -> torch.Tensor:
    """Return the bounds of a scan's sequences, by segments."""
    return torch.tensor(bounds, device=device)


@functools.lru_cache(8)
def _identity(heads: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.eye(width, device=device).expand(heads, width, width)


def _cut(bounds: tuple[int, ...], v: torch.Tensor, program: LoadedProgram) -> SliceSegments:
    _, _, H, S = v.shape
    kernels = program.kernels["segment_map"], program.kernels["segment_output"]
    waves = [kernel.blocks * program.multiprocessors for kernel in kernels]
    tile = max(TILE, S)
    _, length = forward._cut(bounds[-1], H * (S // PANEL), *waves, tile)
    return slice_segments(bounds, length, tile, v.device)


class CudaSlice:
    """The forward pass of a slice, as `TorchSlice`.

    Args:
        inputs: as the kernels take them, of one row with tokens.
        bounds: of the sequences in the slice.
        may_stop: whether pass 1 may stop within segments. Then there is a second round, which
            corrects the marked heads; otherwise `marked` stays 0.
        program: the forward pass's.
    """

    def __init__(
        self,
        inputs: ScanInputs,
        bounds: tuple[int, ...],
        may_stop: bool,
        program: LoadedProgram,
    ) -> None:
        v, steps = inputs.v, inputs.steps.values
        H, S = v.shape[2:]
        self._program, self._round = program, 0
        self._cut = _cut(bounds, v, program)
        cut = self._cut.segments
        initial = steps.new_zeros(cut.sequences, H, S, S)
        if inputs.initial_state is not None:
            initial.copy_(inputs.initial_state)
        # from where the last sequence's maps are scanned: the identity, and its state
        self._starts = torch.stack([_identity(H, S, v.device), initial[-1]])
        self._initial, self.inputs = initial, inputs._replace(initial_state=initial)
        self.o = torch.empty_like(v, memory_format=torch.contiguous_format)
        self.final = torch.empty_like(initial)
        self._maps = self._states = None
        if cut.total > cut.sequences:
            self._maps = steps.new_empty(cut.total, H, S, S)
            self._states = torch.empty_like(self._maps)
        self._marked = steps.new_zeros(cut.sequences, H, dtype=torch.int32)
        self._stops = None
        if may_stop and self._cut.length >= LONG and self._maps is not None:
            self._stops = steps.new_empty(cut.total * H * (S // PANEL), dtype=torch.int32)
        self._own: SliceMap | None = None

    def announce(self) -> SliceMap:
        """Run pass 1 and return the map of the slice's last sequence; later only marked heads."""
        before, marked = self._own, self._marked[-1]
        if before is not None and self._stops is None:
            return before
        self._run_maps()
        G, R = self._behind_tail(*self._behind_maps(marked))
        if before is not None:
            again = marked.bool().view(-1, 1, 1)
            G, R = torch.where(again, G, before.G), torch.where(again, R, before.R)
        self._own = SliceMap(G, R, marked.clone())
        return self._own

    def run(self, entering: torch.Tensor | None, marked: torch.Tensor | None) -> None:
        """Compute the outputs; in a second round those of the heads that any rank marked.

        Args:
            entering: the state that enters the first sequence; None if it begins here.
            marked: `[H]`, whether an earlier rank marked the head; None in the first round.
        """
        if marked is not None:
            self._marked[0] |= marked.int()
            self._run_maps()
        if entering is not None:
            self._initial[0] = entering
        parameters, stream, kernels = self._parameters(), self._stream(), self._program.kernels
        if self._maps is not None:
            sequences, H, S, _ = self._initial.shape
            kernels["segment_scan"].launch((sequences * H, S // SCAN_COLUMNS), parameters, stream)
        kernels["segment_output"].launch(self._grid(), parameters, stream)
        self._round = 1

    def saved(self) -> Saved:
        """Return the tensors that `CudaSliceGradient` needs."""
        return Saved(self.inputs, self._maps, self._states, self._cut)

    def _run_maps(self) -> None:
        if self._maps is not None:
            kernel = self._program.kernels["segment_map"]
            kernel.launch(self._grid(), self._parameters(), self._stream())

    def _grid(self) -> tuple[int, int]:
        H, S = self._initial.shape[1:3]
        return self._cut.segments.total * H * (S // PANEL), 1

    def _stream(self) -> int:
        return torch_private.raw_stream(self.o.device.index)

    def _parameters(self, **changes: torch.Tensor) -> Any:
        """Return a launch's parameters; `changes` replace tensors, by their field's name."""
        q, k, v, (steps, _), initial, _, scale, g = self.inputs
        cut, (T, H) = self._cut.segments, v.shape[1:3]
        tensors = {
            "q": q, "k": k, "v": v, "o": self.o, "beta": steps, "initial_state": initial,
            "final_state": self.final, "maps": self._maps, "states": self._states,
            "table": cut.table, "first": cut.first, "stops": self._stops,
            "unfinished": self._marked,
        }  # fmt: skip
        pointers = addresses(*(tensors | changes).values())
        strides = tuple(x.stride()[:3] for x in (q, k, v, self.o))
        group, maps = H // q.shape[2], forward.NO_MAPS
        if self._program.on_hopper:
            maps = forward.scan_maps(v.shape, group, pointers[:4], strides)
        sizes = T, 0, *(step for stride in strides for step in stride), 0, H, self._round
        packed = forward.serialize(*pointers, *sizes, scale, *addresses(g), group)
        return (ctypes.c_char_p * 2)(packed, maps)

    def _behind_maps(self, marked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the product of the last sequence's maps, and the state behind them from zero."""
        _, H, S, _ = self._starts.shape
        count, device = self._cut.of_last, self._starts.device
        if count == 1 or self._maps is None or self._states is None:
            return self._starts[0], self._starts[1]
        maps = self._maps[-count:].repeat(2, 1, 1, 1)
        states = torch.zeros_like(maps)
        states[count:] = self._states[-count:]
        tensors = {  # must live until the launch
            "initial_state": self._starts,
            "maps": maps,
            "states": states,
            "first": bounds_of_scans(0, count, 2 * count, device=device),
            "unfinished": marked.repeat(2),
        }
        parameters = self._parameters(**tensors)
        grid = 2 * H, S // SCAN_COLUMNS
        self._program.kernels["segment_scan"].launch(grid, parameters, self._stream())
        return states[count - 2], states[2 * count - 2]

    def _behind_tail(self, G: torch.Tensor, R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the map of whole tiles followed by the tail, which are two rows of one call."""
        tail = self._cut.tail
        if tail == 0:
            return G, R
        _, k, v, (steps, per_token), *_, g = self.inputs

        def twice(x: torch.Tensor) -> torch.Tensor:
            return x[:, -tail:].repeat(2, *[1] * (x.ndim - 1))

        keys, values = twice(k), twice(v)
        values[0] = 0
        final = forward.forward(
            ScanInputs(
                keys, keys, values,
                StepSizes(twice(steps) if per_token else steps, per_token),
                torch.stack([G, R]), g=None if g is None else twice(g),
            ),
            output_final_state=True, program=self._program,
        ).final_state  # fmt: skip
        return final[0], final[1]


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
