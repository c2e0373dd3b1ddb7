"""The segmented scan's forward pass in CUDA C++: supported calls, segmentation and launches.

It computes the same as the kernels of triton_kernels/segmented_scan.py and returns the same G and
states, so that Triton's backward pass can use them. The kernels are in csrc.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fla.ops.quasar.cuda.driver import PARAMETERS, TENSOR_MAP, tensor_map
from fla.ops.quasar.cuda.program import (
    DTYPES,
    FLOAT,
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
from fla.ops.quasar.operator_types import Saved, Scan, ScanInputs
from fla.ops.quasar.segments import (
    Segments,
    dividing,
    host_bounds,
    longest_of,
    packed_table,
    stay_whole,
)

HEAD_DIMS = (64, 128)
"""The head widths that the CUDA kernels support."""
READ_STEP = ("-DQUASAR_READ_STEP",)
"""NVRTC's option for step sizes per token, without decays."""
PANEL = 64
"""Rows (pass 1) or columns (pass 2) of a state that a block computes; PANEL in fragments.cuh."""
CHUNK = 16
"""Tokens of a chunk; CHUNK in fragments.cuh."""
TILE = 64
"""Tokens of a tile; segments are multiples of it."""
LONG = 3072
"""Minimum length of segments in which pass 1 may stop early. The kernels are then launched a second
time, for heads that stopped too early. In shorter segments this costs more time than it saves. With
decays, by which most heads forget sooner, half as many tokens are enough."""
EVEN = 0.92
"""The segments' blocks should fill at least this share of their rounds. A round is one block on
every multiprocessor."""

CSRC = Path(__file__).with_name("csrc")
"""The folder of the kernels' sources."""
SCAN_COLUMNS = 8
"""State columns of a block of a scan or a fold; COLUMNS in scan_maps.cuh and gradient_scan.cu."""
_ALIGNMENT = 16  # bytes of the kernels' loads
NO_MAPS = bytes(5 * TENSOR_MAP)
"""The second parameter on GPUs without tensor maps."""


class Arguments(ctypes.Structure):
    """`quasar::scan::Arguments` of segments.cuh."""

    _fields_ = [
        *fields(POINTER, "q k v o beta initial_state final_state maps states table first"),
        *fields(POINTER, "stops unfinished"),
        *fields(INT64, "T length"),
        *fields(INT64 * 3, "q_stride k_stride v_stride o_stride"),
        *fields(INT, "per_sequence heads repeat"),
        *fields(FLOAT, "scale"),
        *fields(POINTER, "decay"),
        *fields(INT, "group"),
    ]


PROGRAM = CudaProgram(
    "segmented_scan",
    [CSRC / f"segment_{part}.cu" for part in ("map", "scan", "output")],
    {"segment_map_{}": Arguments, "segment_scan": Arguments, "segment_output_{}": Arguments},
    "the CUDA kernels are not used, Triton serves: %s",
)
serialize = serializer(Arguments)


@functools.cache
def options_for(width: int, pairs: bool = True) -> tuple[str, ...]:
    """Return NVRTC's options for heads of `width` channels.

    Args:
        pairs: whether a token's number of panels is even, so that Hopper's blocks can form pairs.
    """
    return f"-DQUASAR_HEAD={width}", *(() if pairs else ("-DQUASAR_ALONE",))


def step_options(inputs: ScanInputs) -> tuple[str, ...]:
    """Return NVRTC's options for a call's step sizes and decays."""
    if not inputs.steps.per_token:
        return ()
    return READ_STEP if inputs.g is None else ("-DQUASAR_DECAY",)


def variant_of(v: torch.Tensor, options: tuple[str, ...] = ()) -> Variant:
    """Return the programs' variant for a call with v `[B, T, H, S]`; `options` are NVRTC's."""
    _, _, H, S = v.shape
    return variant_for(v.device.index, v.dtype, H, S, options)


@functools.lru_cache(256)
def variant_for(
    device: int, dtype: torch.dtype, H: int, S: int, options: tuple[str, ...] = ()
) -> Variant:
    """Return `variant_of` for H heads of S channels, before there are tensors."""
    return Variant(device, dtype, options_for(S, H * (S // PANEL) % 2 == 0) + options)


def reason_against(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Return why the CUDA kernels do not support a call, or None if they do.

    q, k and v are those of `ScanInputs`, in any dtype and with any strides.
    """
    if not q.is_cuda or torch.version.cuda is None:
        return "the tensors are not on an NVIDIA GPU"
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v must all be bf16 or fp16; they are {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[-1] not in HEAD_DIMS:
        widths = " or ".join(map(str, HEAD_DIMS))
        return f"heads must have {widths} channels; they have {q.shape[-1]}"
    if q.numel() == 0:
        return "there are no tokens"
    for name, x in (("q", q), ("k", k), ("v", v)):
        batch, token, head, channel = x.stride()
        # 8 elements are 16 bytes
        if channel != 1 or x.data_ptr() % _ALIGNMENT or (batch | token | head) % 8:
            return f"rows of {name} must be contiguous and start at multiples of 16 bytes"
        if not (batch and token and head) and any(
            step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)
        ):
            return f"{name} is expanded: tensor maps do not support a stride of zero"
    return None


@functools.lru_cache(1024)
def _cut(tokens: int, chains: int, wave: int, multiprocessors: int, tile: int) -> tuple[int, int]:
    """Return the number of segments of each sequence, and their length, a multiple of `tile`.

    Args:
        tokens: of the (longest) sequence.
        chains: sequences times heads times a head's panels; the tokens of one chain are processed
            sequentially.
        wave: blocks that the whole device runs at once, in the pass in which these are fewer.
    """
    # a pass costs as much as tokens / n tokens, the scan between both passes as much as 16 n
    tokens = max(tokens, 1)
    most = max(1, min(math.isqrt(tokens // 16), wave // chains))

    def is_even(n: int) -> bool:
        rounds = n * chains / multiprocessors
        return rounds >= EVEN * math.ceil(rounds)

    n = next(filter(is_even, range(most, most // 2, -1)), most)
    length = tile * math.ceil(math.ceil(tokens / n) / tile)
    return math.ceil(tokens / length), length


def cut_evenly(
    program: LoadedProgram, tokens: int, sequences: int, H: int, S: int
) -> tuple[int, int]:
    """Return the number and the length of segments for sequences of (at most) `tokens` tokens.

    The length is a multiple of `tile_of(S)`.
    """
    kernels, multiprocessors = program.kernels, program.multiprocessors
    # the blocks of either pass must fit in one wave
    wave = min(kernels["segment_map"].blocks, kernels["segment_output"].blocks) * multiprocessors
    return _cut(tokens, sequences * H * (S // PANEL), wave, multiprocessors, max(TILE, S))


def tile_of(S: int) -> int:
    """Return the number of tokens of which each segment's length is a multiple."""
    return max(TILE, S)  # the backward pass stores a checkpoint every S tokens


def cut_segments(
    program: LoadedProgram,
    shape: tuple[int, ...],
    device: torch.device,
    cu_seqlens: torch.Tensor | None,
    count: int | None = None,
    every: int | None = None,
) -> Segments:
    """Cut the sequences of a v `[B, T, H, S]` of this shape, or the packed ones, into segments.

    Args:
        count: replaces the number of segments of each sequence; only without cu_seqlens.
        every: n, a multiple of `tile_of(S)`, if a segment must end after every n tokens.
    """
    B, T, H, S = shape
    tile = tile_of(S)
    warps = H * (S // PANEL) * program.kernels["segment_output"].threads // 32
    if cu_seqlens is None:
        if count is None and stay_whole(T, B * T, warps, program.multiprocessors):
            count = 1
        if count is None:
            _, length = cut_evenly(program, T, B, H, S)
        else:
            length = tile * math.ceil(math.ceil(T / count) / tile)
        length = length if every is None else dividing(every, length, tile)
        count = math.ceil(T / length)
        return Segments(B * count, B, count, length, None, None, length)
    bounds = host_bounds(cu_seqlens)
    longest = longest_of(bounds)
    if stay_whole(longest, bounds[-1], warps, program.multiprocessors):
        length = tile * math.ceil(max(longest, 1) / tile)
    else:
        _, length = cut_evenly(program, bounds[-1], 1, H, S)
    length = length if every is None else dividing(every, length, tile)
    packed = packed_table(bounds, length, device, longest_first=True)
    return Segments(packed.table.shape[0], len(bounds) - 1, 0, 0, *packed)


@functools.lru_cache(1024)
def tensor_maps(
    shape: tuple[int, ...],
    heads: tuple[int, ...],
    pointers: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    tokens: tuple[int, ...],
) -> bytes:
    """Return the concatenated tensor maps of tensors `[B, T, H, S]`.

    Args:
        shape: (B, T, S).
        heads: H of each tensor.
        pointers: the tensors' addresses.
        strides: their strides by batch, token and head.
        tokens: the tokens of their tiles, which have PANEL channels.
    """
    B, T, S = shape
    return b"".join(
        tensor_map(place, (S, H, T, B), (head, token, batch), (PANEL, 1, count, 1))
        for H, place, (batch, token, head), count in zip(
            heads, pointers, strides, tokens, strict=True
        )
    )


def launch_parameters(
    program: LoadedProgram,
    inputs: ScanInputs,
    cut: Segments,
    results: Sequence[Any],
    stopping: Sequence[torch.Tensor | None],
    repeats: Sequence[int],
) -> list[Any]:
    """Return each repetition's kernel parameters: `Arguments` and, on Hopper, `TensorMaps`.

    Args:
        results: o, the final state, G (the segments' maps) and the states.
        stopping: `stops` and `unfinished` of `Arguments`.
        repeats: for each repetition, whether to compute only the unfinished heads.
    """
    q, k, v, (steps, _), initial_state, _, scale, g = inputs
    B, T, H, S = v.shape
    group = H // q.shape[2]
    o, *states = results
    *pointers, decay = addresses(
        q, k, v, o, steps, initial_state, *states, cut.table, cut.first, *stopping, g
    )
    qs, ks, vs, os = q.stride()[:3], k.stride()[:3], v.stride()[:3], o.stride()[:3]
    maps = NO_MAPS
    if program.on_hopper:  # of q and k by chunks, and of k, v and o by tiles
        places = pointers[0], pointers[1], *pointers[1:4]
        heads, tokens = (*(H // group,) * 3, H, H), (CHUNK, CHUNK, TILE, TILE, TILE)
        maps = tensor_maps((B, T, S), heads, places, (qs, ks, ks, vs, os), tokens)
    sizes = T, cut.length, *qs, *ks, *vs, *os, cut.per_sequence, H
    parameters = []
    for repeat in repeats:
        arguments = serialize(*pointers, *sizes, repeat, scale, decay, group)
        parameters.append(PARAMETERS(arguments, maps))
    return parameters


def forward(
    inputs: ScanInputs,
    output_final_state: bool = False,
    *,
    segments: int | None = None,
    every: int | None = None,
    program: LoadedProgram | None = None,
    into: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None = None,
) -> Scan:
    """Run the forward pass on the current stream; q's device must be the current one.

    Args:
        inputs: `reason_against` must be None for their q, k and v. At the first call with a
            `cu_seqlens` on the GPU, the host waits for the GPU to read its values.
        output_final_state: whether to return the state after each sequence.
        segments: replaces the built-in number of segments of each sequence.
        every: as in `cut_segments`.
        program: PROGRAM, loaded for this kind of call; None loads it.
        into: tensors for o, G and the states (`Saved`), or None for new ones.

    Raises:
        CudaUnavailableError: the kernels cannot be compiled, loaded or launched.
    """
    v, steps = inputs.v, inputs.steps.values
    H, S = v.shape[2:]
    program = program or PROGRAM.load(variant_of(v, step_options(inputs)))
    cut = cut_segments(program, tuple(v.shape), v.device, inputs.cu_seqlens, segments, every)
    grid = cut.total * H * (S // PANEL), 1
    final = G = states = None
    if output_final_state:
        final = steps.new_empty(cut.sequences, H, S, S)
    if into is not None:
        o, G, states = into
    else:
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        if cut.total > cut.sequences:
            G = steps.new_empty(cut.total, H, S, S)
            states = torch.empty_like(G)
    stops = unfinished = None
    if G is not None and cut.length >= (LONG if inputs.g is None else LONG // 2):
        stops = steps.new_empty(grid[0], dtype=torch.int32)
        unfinished = steps.new_empty(cut.sequences * H, dtype=torch.int32)
    results, stopping = (o, final, G, states), (stops, unfinished)
    # the second repetition computes only the heads in which pass 1 stopped too early (see LONG)
    repeats = (0,) if stops is None else (0, 1)
    for parameters in launch_parameters(program, inputs, cut, results, stopping, repeats):
        if G is not None:
            program.kernels["segment_map"].launch(grid, parameters)
            scan_grid = cut.sequences * H, S // SCAN_COLUMNS
            program.kernels["segment_scan"].launch(scan_grid, parameters)
        program.kernels["segment_output"].launch(grid, parameters)
    return Scan(o, final, Saved(inputs, G, states, cut))


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
