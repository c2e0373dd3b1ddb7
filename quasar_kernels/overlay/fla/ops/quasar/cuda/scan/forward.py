"""The forward pass of the segmented scan in CUDA C++: when it applies, how it is cut, its launches.

It computes what triton_kernels/segmented_scan.py's kernels compute, and hands on the same G and
states, so that the Triton backward pass follows it. csrc holds the kernels.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
from pathlib import Path
from typing import NamedTuple

import torch

from fla.ops.quasar.cuda.driver import Kernel, TENSOR_MAP, load_kernels, tensor_map
from fla.ops.quasar.cuda.nvrtc import HOPPER, CudaUnavailableError, compile_files
from fla.ops.quasar.segments import Segments, packed_table

HEAD_DIMS = (64, 128)
"""The head widths that the CUDA kernels are written for."""
PANEL = 64
"""Rows (pass 1) or columns (pass 2) of a state that a block takes; PANEL in fragments.cuh."""
CHUNK = 16
"""Tokens of a chunk; CHUNK in fragments.cuh."""
CAPABILITY = (8, 0)
"""The oldest compute capability that they compile for."""
TILE = 64
"""Segments are multiples of this many tokens, which the kernels take at once."""
LONG = 3072
"""Tokens of a segment from which on pass 1 may stop within it: in shorter ones heads forget too
little to pay for the launches that compute again what was stopped wrongly."""

CSRC = Path(__file__).with_name("csrc")
"""The folder of the kernels' sources."""
_SOURCES = [CSRC / f"segment_{part}.cu" for part in ("map", "scan", "output")]
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Names of the dtypes that the CUDA kernels take."""
_SCAN_COLUMNS = 8  # state columns a block of the scan owns: COLUMNS in segment_scan.cu
_ALIGNMENT = 16  # bytes of the kernels' loads
_NO_MAPS = bytes(5 * TENSOR_MAP)


ARGUMENTS = struct.Struct("13P14q3if")
"""`quasar::scan::Arguments` of segments.cuh: 13 addresses, T, length and 4 x 3 strides, two counts,
`repeat`, the scale."""


class Forward(NamedTuple):
    """Results of `forward`."""

    o: torch.Tensor  # [B, T, H, S] contiguous, q's dtype
    final_state: torch.Tensor | None  # [sequences, H, S, S] fp32, when asked for
    G: torch.Tensor | None  # [total, H, S, S] fp32, and None where no sequence has two segments
    states: torch.Tensor | None  # the same shape: the state after each segment but the last
    segments: Segments  # how G and states are cut


class _Program(NamedTuple):
    map: Kernel
    scan: Kernel
    output: Kernel
    multiprocessors: int
    takes_maps: bool  # copies by tensor maps, as Hopper's kernels do


def require_capability(capability: tuple[int, int]) -> None:
    """Raise CudaUnavailableError where a GPU of this capability is too old for the kernels."""
    if capability < CAPABILITY:
        raise CudaUnavailableError(
            "the GPU has compute capability {}.{}; the CUDA kernels need {}.{}".format(
                *capability, *CAPABILITY
            ),
            "set QUASAR_BACKEND=triton to stop trying",
        )


def compile_program(
    capability: tuple[int, int], dtype: str, options: tuple[str, ...], width: int = 64
) -> bytes:
    """Return the kernels' machine code for a GPU's capability, `bf16` or `fp16`, and head width.

    Raises:
        CudaUnavailableError: the GPU is too old, there is no NVRTC, no source, or it does not
            compile.
    """
    require_capability(capability)
    options = (f"-DQUASAR_ONLY_{dtype.upper()}", f"-DQUASAR_HEAD={width}", *options)
    name = f"segmented_scan-{width}-{dtype}"
    return compile_files(name, _SOURCES, capability, options)


class ProgramKey(NamedTuple):
    """What the kernels are compiled and loaded for."""

    device: int
    dtype: torch.dtype
    width: int  # of the heads, one of HEAD_DIMS
    pairs: bool  # a token has an even number of panels, so that Hopper's blocks can work in pairs


def program_key(q: torch.Tensor) -> ProgramKey:
    """Return what a call with q `[B, T, H, S]` needs the kernels for."""
    _, _, H, S = q.shape
    return ProgramKey(q.device.index, q.dtype, S, H * (S // PANEL) % 2 == 0)


@functools.cache
def load_program(key: ProgramKey, options: tuple[str, ...] = ()) -> _Program:
    """Compile (or read from the cache) and load the kernels; about a second once.

    Raises:
        CudaUnavailableError: they cannot be built or loaded there.
    """
    device, dtype, width, pairs = key
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    if capability == HOPPER and not pairs:
        options = ("-DQUASAR_ALONE", *options)
    suffix = DTYPES[dtype]
    code = compile_program(capability, suffix, options, width)
    names = [
        f"quasar_segment_map_{suffix}",
        "quasar_segment_scan",
        f"quasar_segment_output_{suffix}",
    ]
    kernels = load_kernels(code, names, device)
    return _Program(
        *(kernels[name] for name in names),
        properties.multi_processor_count,
        capability == HOPPER,
    )


def reason_against(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Return why the CUDA kernels do not take a call, or None where they do.

    q, k, v: `[B, T, H, S]`, of one shape.
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
        # 8 elements are 16 bytes
        if x.stride(3) != 1 or x.data_ptr() % _ALIGNMENT or any(s % 8 for s in x.stride()[:3]):
            return f"rows of {name} must be contiguous and start at multiples of 16 bytes"
        if any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
            return f"{name} is expanded: tensor maps take no stride of zero"
    return None


@functools.lru_cache(1024)
def _cut(tokens: int, chains: int, map_wave: int, output_wave: int, tile: int) -> tuple[int, int]:
    """Return the segments of each sequence and their length in tokens, a multiple of `tile`.

    Args:
        tokens: of the (longest) sequence.
        chains: sequences times heads times a head's panels, each a sequential walk of its own.
        map_wave, output_wave: blocks of pass 1 and of pass 2 that the device runs at once.
    """
    # both passes in one wave, with as many blocks on every multiprocessor: none waits for another's
    most = min(map_wave, output_wave) // chains
    # a walk costs about tokens / n, the scan between the passes about 16 tokens' walk a segment
    tokens = max(tokens, 1)
    n = max(1, min(math.isqrt(tokens // 16), most))
    length = tile * math.ceil(math.ceil(tokens / n) / tile)
    return math.ceil(tokens / length), length


def cut_segments(
    program: _Program, q: torch.Tensor, cu_seqlens: torch.Tensor | None, count: int | None = None
) -> Segments:
    """Cut the sequences of q `[B, T, H, S]`, or the packed ones (B = 1), into segments.

    `count` asks for that many segments of each sequence, where they are not packed.
    """
    B, T, H, S = q.shape
    chains = H * (S // PANEL)  # of one sequence: blocks that walk one segment
    waves = [x.blocks * program.multiprocessors for x in (program.map, program.output)]
    tile = max(TILE, S)  # the backward pass keeps a state every S tokens
    if cu_seqlens is None:
        if count is None:
            count, length = _cut(T, B * chains, *waves, tile)
        else:
            length = tile * math.ceil(math.ceil(T / count) / tile)
            count = math.ceil(T / length)
        return Segments(B * count, B, count, length, None, None, length)
    bounds = cu_seqlens.tolist()
    _, length = _cut(bounds[-1], chains, *waves, tile)
    packed = packed_table(bounds, length, q.device)
    return Segments(packed.table.shape[0], len(bounds) - 1, 0, 0, *packed)


@functools.lru_cache(1024)
def _tensor_maps(
    shape: tuple[int, ...], addresses: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> bytes:
    # of q, k, v and o [B, T, H, S], strides by batch, token and head: TensorMaps of csrc/copies.cuh
    B, T, H, S = shape
    maps = []
    for i, tokens in ((0, CHUNK), (1, CHUNK), (1, TILE), (2, TILE), (3, TILE)):
        batch, token, head = strides[i]
        sizes, box = (S, H, T, B), (PANEL, 1, tokens, 1)
        maps.append(tensor_map(addresses[i], sizes, (head, token, batch), box))
    return b"".join(maps)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    scale: float = 1.0,
    cu_seqlens: torch.Tensor | None = None,
    *,
    segments: int | None = None,
    options: tuple[str, ...] = (),
) -> Forward:
    """Run the forward pass on the current stream; q's device must be the current one.

    Args:
        q, k, v: `[B, T, H, S]` for which `reason_against` is None.
        beta: `[H]` fp32 contiguous.
        initial_state: `[sequences, H, S, S]` fp32 contiguous, or None for zero.
        output_final_state: whether to return the state after each sequence.
        scale: factor of the output.
        cu_seqlens: `[N + 1]` bounds of sequences packed in one row; reading them synchronises.
        segments: segments of each sequence instead of the built-in choice.
        options: of NVRTC, for experiments.

    Raises:
        CudaUnavailableError: the kernels cannot be built, loaded or launched.
    """
    T, H, S = q.shape[1:]
    program = load_program(program_key(q), options)
    cut = cut_segments(program, q, cu_seqlens, segments)
    grid = cut.total * H * (S // PANEL), 1
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    final = G = states = None
    if output_final_state:
        final = beta.new_empty(cut.sequences, H, S, S)
    if cut.total > cut.sequences:
        G = beta.new_empty(cut.total, H, S, S)
        states = torch.empty_like(G)
    stops = unfinished = None
    if G is not None and cut.length >= LONG:
        stops = beta.new_empty(grid[0], dtype=torch.int32)
        unfinished = beta.new_empty(cut.sequences * H, dtype=torch.int32)
    tensors = (q, k, v, o, beta, initial_state, final, G, states, cut.table, cut.first)
    addresses = tuple(0 if x is None else x.data_ptr() for x in (*tensors, stops, unfinished))
    strides = tuple(x.stride()[:3] for x in (q, k, v, o))
    sizes = T, cut.length, *itertools.chain(*strides), cut.per_sequence, H
    maps = _tensor_maps(q.shape, addresses[:4], strides) if program.takes_maps else _NO_MAPS
    stream = torch._C._cuda_getCurrentRawStream(q.device.index)
    for repeat in (0, 1) if stops is not None else (0,):
        packed = ARGUMENTS.pack(*addresses, *sizes, repeat, scale)
        parameters = (ctypes.c_char_p * 2)(packed, maps)
        if G is not None:
            program.map.launch(grid, parameters, stream)
            program.scan.launch((cut.sequences * H, S // _SCAN_COLUMNS), parameters, stream)
        program.output.launch(grid, parameters, stream)
    return Forward(o, final, G, states, cut)
