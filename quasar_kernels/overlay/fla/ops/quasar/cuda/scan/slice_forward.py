"""The segmented scan of one rank's slice in CUDA C++: the forward pass around its exchange.

In addition to the kernels of scan_forward.py, three kernels run before and after the exchange. The
last sequence of a slice ends with a segment of less than a tile, the tail, so that all segments
before it consist of whole tiles and have a map. Two scans over these maps give the map of the
slice: R by a scan from the sequence's first state, G by a scan from the identity. After the
exchange, the fold of the earlier ranks' maps gives the state that enters the slice. If the slice
has one sequence, both scans store their results after each segment, and one product adds the effect
of the entering state to the stored states. Otherwise, and in a second round, the states are scanned
again.
"""

from __future__ import annotations

import ctypes
import functools
from itertools import pairwise
from typing import NamedTuple

import torch

from fla.ops.quasar.cuda.program import (
    INT,
    INT64,
    POINTER,
    CudaProgram,
    LoadedProgram,
    Variant,
    addresses,
    fields,
    serializer,
)
from fla.ops.quasar.cuda.scan import scan_forward
from fla.ops.quasar.cuda.scan.scan_forward import CSRC, LONG, PANEL, SCAN_COLUMNS
from fla.ops.quasar.parallel.context import Place
from fla.ops.quasar.parallel.exchange import pack_map, unpack_maps
from fla.ops.quasar.operator_types import Saved, ScanInputs, StepSizes
from fla.ops.quasar.segments import Segments


class SliceArguments(ctypes.Structure):
    """`quasar::scan::SliceArguments` of slice_maps.cu."""

    _fields_ = [
        *fields(POINTER, "maps states prefixes start map unfinished"),
        *fields(INT, "steps heads keep repeat"),
    ]


class EnterArguments(ctypes.Structure):
    """`quasar::scan::EnterArguments` of slice_maps.cu."""

    _fields_ = [*fields(POINTER, "prefixes states entering"), *fields(INT, "heads")]


class FoldArguments(ctypes.Structure):
    """`quasar::scan::FoldArguments` of slice_maps.cu."""

    _fields_ = [
        *fields(POINTER, "G R state marks unfinished"),
        *fields(INT64, "G_stride R_stride"),
        *fields(INT, "count transposed"),
    ]


PROGRAM = CudaProgram(
    "slice_maps",
    [CSRC / "slice_maps.cu"],
    {"slice_map": SliceArguments, "fold_maps": FoldArguments, "enter_states": EnterArguments},
    "slices of a sequence are computed by PyTorch, not by CUDA kernels: %s",
)
"""Loaded for the variants of `maps_variant`."""
_serialize_slice, _serialize_fold = serializer(SliceArguments), serializer(FoldArguments)
_serialize_enter = serializer(EnterArguments)


def maps_variant(v: torch.Tensor) -> Variant:
    """Return PROGRAM's variant for a call with v `[B, T, H, S]`."""
    return Variant(v.device.index, v.dtype, (f"-DQUASAR_HEAD={v.shape[3]}",))


class SliceSegments(NamedTuple):
    """The segments of a slice."""

    segments: Segments
    of_first: int  # segments of the first sequence
    of_last: int  # segments of the last sequence, its tail included
    length: int  # tokens of a whole segment
    tail: int  # tokens of the tail
    without_first: torch.Tensor  # the table without the first sequence's mark for its first segment


@functools.lru_cache(64)
def slice_segments(
    bounds: tuple[int, ...], length: int, tile: int, device: torch.device
) -> SliceSegments:
    """Cut a slice's sequences into segments of `length` tokens, and the last one's tail.

    The tail, the tokens after the last whole tile, is a segment even if it is empty. The result is
    cached, because the host waits for the GPU when it copies a table to it.
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


class CudaSlice:
    """The forward pass of a slice, as `TorchSlice`.

    Args:
        inputs: as `backend.kernel_inputs` returns them, of one row with at least one token.
        place: the slice's place.
        may_stop: whether pass 1 may stop within segments. The caller must then run a second round,
            which corrects the marked heads.
        program: scan_forward.py's PROGRAM, loaded.
        maps_program: PROGRAM, loaded.
    """

    def __init__(
        self,
        inputs: ScanInputs,
        place: Place,
        may_stop: bool,
        program: LoadedProgram,
        maps_program: LoadedProgram,
    ) -> None:
        v, steps = inputs.v, inputs.steps.values
        H, S = v.shape[2:]
        self._program, self._maps_program, self._place = program, maps_program, place
        self._round = 0
        _, length = scan_forward.cut_evenly(program, place.bounds[-1], 1, H, S)
        self._cut = slice_segments(place.bounds, length, scan_forward.tile_of(S), v.device)
        cut = self._cut.segments
        states = cut.sequences * H * S * S
        zeros = steps.new_zeros(states + cut.sequences * H)
        initial = zeros[:states].view(cut.sequences, H, S, S)
        if inputs.initial_state is not None:
            initial.copy_(inputs.initial_state)
        self._marked = zeros[states:].view(torch.int32)  # [sequences H]
        self._initial, self.inputs = initial, inputs._replace(initial_state=initial)
        self.o = torch.empty_like(v, memory_format=torch.contiguous_format)
        self.final = torch.empty_like(initial)
        self._maps = self._states = self._prefixes = None
        if cut.total > cut.sequences:
            self._maps = steps.new_empty(cut.total, H, S, S)
            self._states = torch.empty_like(self._maps)
            if cut.sequences == 1 and place.before:
                self._prefixes = torch.empty_like(self._maps)
        self._map = steps.new_empty(2 * H * S * S + H)  # of the last sequence's whole tiles
        self._stops = None
        if may_stop and self._cut.length >= LONG and self._maps is not None:
            self._stops = steps.new_empty(cut.total * H * (S // PANEL), dtype=torch.int32)
        self._parameters = scan_forward.launch_parameters(
            program,
            self.inputs,
            cut,
            (self.o, self.final, self._maps, self._states),
            (self._stops, self._marked),
            (0, 1) if may_stop else (0,),
        )

    def compute_map(self) -> torch.Tensor:
        """Run pass 1 and return the packed map (`pack_map`) of the slice's last sequence.

        In a second round only the marked heads are computed.
        """
        if not self._round or self._stops is not None:
            self._run_maps()
            self._join_maps()
            self._packed_map = self._with_tail()
        return self._packed_map

    def run(self, all_maps: torch.Tensor) -> None:
        """Compute the outputs; in a second round those of the heads that any rank marked.

        Args:
            all_maps: the packed maps of all ranks.
        """
        if self._place.before:
            self.enter(all_maps)
            if self._round:  # for heads that other ranks marked
                self._run_maps()
        sequences, H, S, _ = self._initial.shape
        parameters, kernels = self._parameters[self._round], self._program.kernels
        if self._maps is not None and (sequences > 1 or self._round):
            kernels["segment_scan"].launch((sequences * H, S // SCAN_COLUMNS), parameters)
        elif self._prefixes is not None:
            tensors = addresses(self._prefixes, self._states, self._initial)
            grid = (self._cut.of_last - 1) * H, (S // PANEL) ** 2
            arguments = _serialize_enter(*tensors, H)
            self._maps_program.kernels["enter_states"].launch(grid, arguments)
        kernels["segment_output"].launch(self._grid(), parameters)
        self._round += 1

    def enter(self, all_maps: torch.Tensor) -> None:
        """Compute the state that enters the slice, and in a second round the marks of its heads."""
        _, H, S, _ = self._initial.shape
        row, map_size, before = all_maps.stride(0), H * S * S, self._place.before
        first = all_maps.data_ptr() + 4 * row * (self._place.rank - before)
        fold_maps(
            self._maps_program,
            self._initial[0],
            G=first + 4 * row,
            R=first + 4 * map_size,
            strides=(row, row),
            count=before,
            marks=first + 8 * map_size if self._round else 0,
            unfinished=self._marked,
        )

    def saved(self) -> Saved:
        """Return the tensors that `CudaSliceGradient` needs."""
        return Saved(self.inputs, self._maps, self._states, self._cut)

    def _run_maps(self) -> None:
        if self._maps is not None:
            kernel = self._program.kernels["segment_map"]
            kernel.launch(self._grid(), self._parameters[self._round])

    def _grid(self) -> tuple[int, int]:
        H, S = self._initial.shape[1:3]
        return self._cut.segments.total * H * (S // PANEL), 1

    def _join_maps(self) -> None:
        """Compute the map of the last sequence's whole tiles; in a second round for marked heads.

        R starts from the sequence's initial state; if the sequence begins on another rank, from
        zero.
        """
        sequences, H, S, _ = self._initial.shape
        state, count = 4 * H * S * S, self._cut.of_last  # state: in bytes
        maps = states = start = 0
        keep = sequences == 1 and not self._round
        prefixes = self._prefixes if keep else None
        if count > 1:
            skipped = (self._cut.segments.total - count) * state
            maps, states = (x + skipped for x in addresses(self._maps, self._states))
        if sequences > 1 or not self._place.before:
            start = self._initial.data_ptr() + (sequences - 1) * state
        marked = self._marked.data_ptr() + 4 * (sequences - 1) * H
        result = self._map.data_ptr()
        pointers = maps, states, *addresses(prefixes), start, result, marked
        arguments = _serialize_slice(*pointers, count - 1, H, keep, self._round)
        kernel = self._maps_program.kernels["slice_map"]
        kernel.launch((H, 2 * S // SCAN_COLUMNS), arguments)

    def _with_tail(self) -> torch.Tensor:
        """Return the packed map of the whole tiles and the tail.

        The tail is processed twice: from G with zero values, and from R.
        """
        tail = self._cut.tail
        if tail == 0:
            return self._map
        _, k, v, (steps, per_token), *_, g = self.inputs
        maps = unpack_maps(self._map.unsqueeze(0), *v.shape[2:], v.shape[3])

        def twice(x: torch.Tensor) -> torch.Tensor:
            return x[:, -tail:].repeat(2, *[1] * (x.ndim - 1))

        keys, values = twice(k), twice(v)
        values[0] = 0
        final = scan_forward.forward(
            ScanInputs(
                keys, keys, values,
                StepSizes(twice(steps) if per_token else steps, per_token),
                torch.cat([maps.G, maps.R]), g=None if g is None else twice(g),
            ),
            output_final_state=True, program=self._program,
        ).final_state  # fmt: skip
        return pack_map(*final, maps.marked[0])


def fold_maps(
    program: LoadedProgram,
    state: torch.Tensor,
    *,
    G: int,
    R: int,
    strides: tuple[int, int],
    count: int,
    marks: int = 0,
    unfinished: torch.Tensor | None = None,
    transposed: bool = False,
) -> None:
    """Set state `[H, S, S]` to R[0], then `count` - 1 times to G[n] state + R[n], in fp64.

    Args:
        program: PROGRAM.
        G, R: the addresses of G[1] and R[0], `[H, S, S]` fp32.
        strides: elements between n and n + 1, of G and of R.
        count: the number of R.
        marks: the address of the marks `[H]` of n = 0, or 0 for none; they have R's stride.
        unfinished: `[H]`; becomes 1 for a head that has a mark other than 0.
        transposed: whether to multiply by G[n]^T instead of G[n].
    """
    H, S, _ = state.shape
    pointers = G, R, state.data_ptr(), marks, *addresses(unfinished)
    arguments = _serialize_fold(*pointers, *strides, count, transposed)
    program.kernels["fold_maps"].launch((H, S // SCAN_COLUMNS), arguments)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
