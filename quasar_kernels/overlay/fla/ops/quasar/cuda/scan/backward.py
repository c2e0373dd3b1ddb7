"""The backward pass of the segmented scan in CUDA C++: when it applies, and its launches.

It computes what triton_kernels/segmented_scan_bwd.py's kernels compute, from what forward.py saved.
csrc/backward holds the kernels.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
from typing import NamedTuple

import torch

from fla.ops.quasar.cuda.scan import forward as cuda_scan
from fla.ops.quasar.cuda.driver import Kernel, TENSOR_MAP, load_kernels, tensor_map
from fla.ops.quasar.cuda.scan.forward import PANEL, ProgramKey, TILE
from fla.ops.quasar.cuda.nvrtc import HOPPER, CudaUnavailableError, compile_files
from fla.ops.quasar.segments import Segments

_SOURCES = [
    cuda_scan.CSRC / "backward" / f"{part}.cu"
    for part in ("state_checkpoint", "state_gradient", "gradient_scan", "input_gradient")
]
_SCAN_COLUMNS = 8  # state columns a block of the scan owns: COLUMNS in gradient_scan.cu
_NO_MAPS = bytes(8 * TENSOR_MAP)

ARGUMENTS = struct.Struct("18P14q3if")
"""`quasar::scan::GradientArguments` of gradients.cuh: 18 addresses, T, length and 4 x 3 strides,
three counts, the scale."""


class Gradients(NamedTuple):
    """Results of `backward`; those of q, k and v are `[B, T, H, S]` in their dtype, contiguous."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor  # [H] fp32
    initial_state: torch.Tensor | None  # [sequences, H, S, S] fp32, where there was one


class _Program(NamedTuple):
    checkpoint: Kernel
    map: Kernel
    scan: Kernel
    state: Kernel
    input: Kernel
    takes_maps: bool  # copies by tensor maps, as Hopper's kernels do


def is_for(key: ProgramKey) -> bool:
    """Return whether the kernels are for such calls, where the forward pass's are.

    A tile of heads of 128 needs the shared memory of Hopper.
    """
    return key.width == PANEL or torch.cuda.get_device_capability(key.device) == HOPPER


def compile_program(
    capability: tuple[int, int], dtype: str, options: tuple[str, ...], width: int = 64
) -> bytes:
    """Return the kernels' machine code for a GPU's capability, `bf16` or `fp16`, and head width.

    Raises:
        CudaUnavailableError: the GPU is too old, there is no NVRTC, no source, or it does not
            compile.
    """
    cuda_scan.require_capability(capability)
    options = (f"-DQUASAR_ONLY_{dtype.upper()}", f"-DQUASAR_HEAD={width}", *options)
    name = f"segmented_scan_bwd-{width}-{dtype}"
    return compile_files(name, _SOURCES, capability, options)


@functools.cache
def load_program(key: ProgramKey, options: tuple[str, ...] = ()) -> _Program:
    """Compile (or read from the cache) and load the kernels; some seconds once.

    Raises:
        CudaUnavailableError: they cannot be built or loaded there.
    """
    device, dtype, width, pairs = key
    capability = torch.cuda.get_device_capability(device)
    if capability == HOPPER and not pairs:
        options = ("-DQUASAR_ALONE", *options)
    suffix = cuda_scan.DTYPES[dtype]
    code = compile_program(capability, suffix, options, width)
    names = [
        f"quasar_state_checkpoint_{suffix}",
        f"quasar_state_gradient_map_{suffix}",
        "quasar_gradient_scan",
        f"quasar_state_gradient_{suffix}",
        f"quasar_input_gradient_{suffix}",
    ]
    kernels = load_kernels(code, names, device)
    return _Program(*(kernels[name] for name in names), capability == HOPPER)


@functools.lru_cache(1024)
def _tensor_maps(
    shape: tuple[int, ...], addresses: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> bytes:
    # of tensors [B, T, H, S], strides by batch, token and head: GradientMaps of gradients.cuh
    B, T, H, S = shape
    sizes, box = (S, H, T, B), (PANEL, 1, TILE, 1)
    return b"".join(
        tensor_map(address, sizes, (head, token, batch), box)
        for address, (batch, token, head) in zip(addresses, strides, strict=True)
    )


def _addresses(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(0 if x is None else x.data_ptr() for x in tensors)


def tile_table(table: torch.Tensor, tile: int) -> torch.Tensor:
    """Cut the rows of a `PackedTable.table` into rows of at most `tile` tokens; synchronises."""
    counts = (table[:, 2] + tile - 1).div(tile, rounding_mode="floor").clamp(min=1)
    sequence, begin, tokens, place = table.repeat_interleave(counts, 0).unbind(1)
    ends = counts.cumsum(0)
    index = torch.arange(sequence.numel(), device=table.device)
    n = index - (ends - counts).repeat_interleave(counts)  # of the tile in its row
    is_last = n == counts.repeat_interleave(counts) - 1
    kept = (place & 1) * (n == 0) + (place & 2) * is_last
    return torch.stack([sequence, begin + n * tile, (tokens - n * tile).clamp(max=tile), kept], 1)


def _cut_tiles(cut: Segments, tokens: int, tile: int) -> tuple[int, int, torch.Tensor | None]:
    """Return rows, tiles of each and the table of what input_gradient.cu takes by tiles.

    The segments serve as they are, unless some of the packed sequences are so much longer than the
    others that most of the tiles of the longest would be empty ones of the others.
    """
    parts = math.ceil(max(cut.longest, 1) / tile)
    if cut.table is None or cut.total * parts <= 4 * (tokens // tile + cut.total):
        return cut.total, parts, cut.table
    table = tile_table(cut.table, tile)
    return table.shape[0], 1, table


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    G: torch.Tensor | None,
    states: torch.Tensor | None,
    d_o: torch.Tensor,
    d_final: torch.Tensor | None,
    scale: float,
    cut: Segments,
    *,
    options: tuple[str, ...] = (),
) -> Gradients:
    """Run the backward pass on the current stream; q's device must be the current one.

    Beside the gradients it takes one tensor like q, for the states between tiles, and a matrix
    `[S, S]` in fp32 for each segment and head.

    Args:
        q, k, v, beta, initial_state, scale: as `cuda_scan.forward` was given them.
        G, states, cut: its results, the last one as `segments`.
        d_o: `[B, T, H, S]` contiguous, q's dtype.
        d_final: `[sequences, H, S, S]` fp32 contiguous, or None for zero.
        options: of NVRTC, for experiments.

    Raises:
        CudaUnavailableError: the kernels cannot be built, loaded or launched.
    """
    T, H, S = q.shape[1:]
    program = load_program(cuda_scan.program_key(q), options)
    if d_o.data_ptr() % 16:  # a part of another tensor may lie anywhere
        d_o = d_o.clone()
    dq, dk, dv, checkpoints = (torch.empty_like(d_o) for _ in range(4))
    rows, parts, tiles = _cut_tiles(cut, T, S)
    d_beta = beta.new_empty(rows * parts, H)
    d_states = None if G is None else torch.empty_like(G)
    d_initial = None if initial_state is None else torch.empty_like(initial_state)
    tensors = (
        q, k, v, d_o, dq, dk, dv, checkpoints, beta, initial_state, d_final, G, states, d_states,
        d_initial, d_beta,
    )  # fmt: skip
    addresses = _addresses(*tensors)
    strides = tuple(x.stride()[:3] for x in (q, k, v, d_o))
    sizes = T, cut.length, *itertools.chain(*strides), cut.per_sequence, H, parts, scale
    maps = _NO_MAPS
    if program.takes_maps:
        maps = _tensor_maps(q.shape, addresses[:8], (*strides, *[strides[3]] * 4))
    parameters, by_tiles = (
        (ctypes.c_char_p * 2)(ARGUMENTS.pack(*addresses, *tables, *sizes), maps)
        for tables in (_addresses(cut.table, cut.first), _addresses(tiles, None))
    )
    stream = torch._C._cuda_getCurrentRawStream(q.device.index)
    walks = cut.total * H * (S // PANEL), 1
    program.checkpoint.launch(walks, parameters, stream)
    if G is not None:
        program.map.launch(walks, parameters, stream)
        program.scan.launch((cut.sequences * H, S // _SCAN_COLUMNS), parameters, stream)
    program.state.launch(walks, parameters, stream)
    program.input.launch((rows * parts * H, 1), by_tiles, stream)
    return Gradients(dq, dk, dv, d_beta.sum(0), d_initial)
