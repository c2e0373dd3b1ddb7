"""Chunk-wise QuasarAttention: a segmented scan in Triton, parallel over T.

The step over any run of tokens is affine in the state, S_out = G S_in + R, so a sequence is cut
into segments. Pass 1 computes each segment's (G, R), a short scan gives every segment the state
that enters it, and pass 2 walks each segment from that state and writes the outputs. The result is
exact: the number of segments changes only the rounding. README.md in this folder has the algebra.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fla.ops.utils.index import prepare_chunk_indices
from fla.ops.quasar.forward_substitution import forward_substitution_kernel
from fla.utils import IS_AMD
from fla.utils import autocast_custom_bwd
from fla.utils import autocast_custom_fwd
from fla.utils import autotune_cache_kwargs
from fla.utils import check_shared_mem
from fla.utils import input_guard

from fla.ops.quasar.chunk_torch import chunk_quasar_torch, l2norm, sequence_lengths
from fla.ops.quasar.segmented_scan import (
    segment_map_kernel,
    segment_output_kernel,
    segment_scan_kernel,
)

MAX_HEAD_DIM = 128
"""Widest head that the Triton kernels hold in registers; wider heads take the torch path."""


class Tiles(NamedTuple):
    """Block sizes, warps and pipeline stages of the three kernels."""

    chunk: int  # tokens of a chunk: 16, 32 or 64
    map_rows: int  # rows of (G, R) that a program owns
    map_warps: int
    map_stages: int
    scan_cols: int  # state columns that a program of the scan owns
    scan_warps: int
    value_cols: int  # state columns that a program of pass 2 owns
    output_warps: int
    output_stages: int


def tiles_for(block: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles for a head padded to `block` channels; all fit 99 KB of shared memory."""
    wide = block > 64
    if dtype == torch.float32:
        return Tiles(16, 32, 4, 1, 16, 8 if wide else 4, 32, 4, 1)
    if wide:
        return Tiles(16, 32, 2, 1, 16, 8, 32, 2, 2)
    return Tiles(16, block, 2, 1, 16, 4, block, 2, 3)


@functools.cache
def _programs_per_wave(device: torch.device) -> int:
    # four programs of two warps and about 255 registers a thread fill a multiprocessor
    if device.type != "cuda":
        return 16  # under the interpreter: enough for several segments
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def segments_for(tokens: int, chains: int, wave: int, chunk: int) -> tuple[int, int]:
    """Return how many segments each sequence gets and their length, a multiple of `chunk`.

    Args:
        tokens: tokens of the (longest) sequence.
        chains: sequences times heads, each a sequential walk of its own.
        wave: programs that the device runs at once.
        chunk: tokens of a chunk.
    """
    # a walk costs about tokens / n, the scan over the maps about 8 tokens' walk a segment
    best = math.isqrt(max(tokens, 1) // 8)
    n = max(1, min(best, wave // chains))
    length = chunk * triton.cdiv(triton.cdiv(max(tokens, 1), n), chunk)
    return triton.cdiv(max(tokens, 1), length), length


def _varlen_table(
    cu_seqlens: torch.Tensor, heads: int, wave: int, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [segments, 4] (sequence, first token, tokens, place) and [N + 1] first segments."""
    bounds = cu_seqlens.tolist()
    _, length = segments_for(bounds[-1], heads, wave, chunk)
    table, first = [], [0]
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        # an empty sequence keeps one empty segment, which hands its initial state on
        starts = range(start, stop, length) or (start,)
        for t in starts:
            place = (t == starts[0]) + 2 * (t == starts[-1])
            table.append((n, t, min(length, stop - t), place))
        first.append(len(table))
    rows = torch.tensor(table, dtype=torch.int64, device=cu_seqlens.device)
    return rows.view(-1, 4), torch.tensor(first, dtype=torch.int64, device=cu_seqlens.device)


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    # the kernels take any batch, token and head stride, so slices of a wider tensor need no copy
    return x if x.stride(-1) == 1 else x.contiguous()


def chunk_quasar_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    scale: float = 1.0,
    *,
    tiles: Tiles | None = None,
    segments: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the three kernels; no autograd. Shapes and dtypes as in `chunk_quasar`.

    Args:
        tiles: block sizes instead of `tiles_for`'s choice, for tuning.
        segments: segments of each sequence instead of `segments_for`'s choice; not with cu_seqlens.
    """
    B, T, H, S = q.shape
    q, k, v = _rows_contiguous(q), _rows_contiguous(k.to(q.dtype)), _rows_contiguous(v.to(q.dtype))
    beta = beta.contiguous()
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    is_varlen = cu_seqlens is not None
    N = cu_seqlens.numel() - 1 if is_varlen else B
    o = torch.empty(B, T, H, S, dtype=q.dtype, device=q.device)
    final = (
        torch.empty(N, H, S, S, dtype=torch.float32, device=q.device)
        if output_final_state
        else None
    )
    if N * H == 0 or (T == 0 and not output_final_state):
        return o, final

    BS = max(16, triton.next_power_of_2(S))
    tiles = tiles or tiles_for(BS, q.dtype)
    wave = _programs_per_wave(q.device)
    table = first = None
    if is_varlen:
        NS, SEG = 0, 0
        table, first = _varlen_table(cu_seqlens, H, wave, tiles.chunk)
        total = table.shape[0]
    else:
        NS, SEG = segments_for(T, N * H, wave, tiles.chunk)
        if segments is not None:
            SEG = tiles.chunk * triton.cdiv(triton.cdiv(T, segments), tiles.chunk)
            NS = triton.cdiv(T, SEG)
        total = N * NS
    # bf16 and fp16 operands leave tf32 digits to spare in the inverse; fp32 wants them all
    precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
    shared = {"H": H, "S": S, "BS": BS, "C": tiles.chunk, "IS_VARLEN": is_varlen}
    shared |= {"PRECISION": precision, "INVERSE": precision}
    strides_k, strides_v = k.stride()[:3], v.stride()[:3]

    states = None
    if total > N:
        maps = torch.empty(2, total, H, S, S, dtype=torch.float32, device=q.device)
        G, states = maps[0], maps[1]
        segment_map_kernel[(total * H, triton.cdiv(S, tiles.map_rows))](
            k, v, beta, table, G, states, T, NS, SEG, *strides_k, *strides_v,
            BR=tiles.map_rows, num_warps=tiles.map_warps, num_stages=tiles.map_stages, **shared,
        )  # fmt: skip
        segment_scan_kernel[(N * H, triton.cdiv(S, tiles.scan_cols))](
            G, states, initial_state, first, NS, H=H, S=S, BS=BS, BV=tiles.scan_cols,
            HAS_INITIAL=initial_state is not None, IS_VARLEN=is_varlen,
            num_warps=tiles.scan_warps, num_stages=2,
        )  # fmt: skip
    segment_output_kernel[(total * H, triton.cdiv(S, tiles.value_cols))](
        q, k, v, beta, table, states, initial_state, final, o, T, NS, SEG, scale,
        *q.stride()[:3], *strides_k, *strides_v, *o.stride()[:3],
        BV=tiles.value_cols, HAS_INITIAL=initial_state is not None, HAS_STATES=states is not None,
        STORE_FINAL=output_final_state,
        num_warps=tiles.output_warps, num_stages=tiles.output_stages, **shared,
    )  # fmt: skip
    return o, final


class ChunkQuasarFunction(torch.autograd.Function):
    """Triton forward; the backward differentiates the torch chunk form, recomputed."""

    @staticmethod
    @autocast_custom_fwd
    def forward(ctx, q, k, v, beta, initial_state, output_final_state, cu_seqlens, scale):
        ctx.save_for_backward(q, k, v, beta, initial_state, cu_seqlens)
        ctx.scale = scale
        with torch.cuda.device(q.device):
            return chunk_quasar_fwd(
                q, k, v, beta, initial_state, output_final_state, cu_seqlens, scale
            )

    @staticmethod
    @autocast_custom_bwd
    def backward(ctx, do, d_final):
        q, k, v, beta, initial_state, cu_seqlens = ctx.saved_tensors
        leaves = [
            None if x is None else x.detach().requires_grad_(needed)
            for x, needed in zip(
                (q, k, v, beta, initial_state), ctx.needs_input_grad[:5], strict=True
            )
        ]
        with torch.enable_grad():
            o, final = chunk_quasar_torch(*leaves, True, cu_seqlens, scale=ctx.scale)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        outputs, grads = ([o, final], [do, d_final]) if d_final is not None else ([o], [do])
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        per_input = [next(found) if x is not None and x.requires_grad else None for x in leaves]
        return *per_input, None, None, None


@torch.compiler.disable
def chunk_quasar(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply QuasarAttention (arXiv 2512.12602) to whole sequences.

    For every sequence and head, with lambda = |k_t|^2 and
    alpha = (1 - exp(-beta lambda)) / (lambda + 1e-8):
    S_t = (I - alpha k_t k_t^T) S_{t-1} + alpha k_t v_t^T and o_t = scale * S_t^T q_t.

    Args:
        q, k, v: `[B, T, H, S]`, bf16, fp16 or fp32, of any strides.
        beta: `[H]`, fp32, positive.
        initial_state: `[N, H, S, S]` fp32, key dimension first, N sequences (B without
            `cu_seqlens`); None is zero.
        output_final_state: whether to return the state after each sequence.
        cu_seqlens: `[N + 1]` int32 or int64 bounds of sequences packed in one row (B = 1).
        scale: factor of the output; the definition has 1.
        use_qk_l2norm_in_kernel: normalise q and k to unit length first; the definition does not.

    Returns:
        o `[B, T, H, S]` in q's dtype, and the final state `[N, H, S, S]` fp32 or None.

    Raises:
        ValueError: shapes that do not fit one another.
    """
    _check_shapes(q, k, v, beta, initial_state, cu_seqlens)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if not q.is_cuda or q.shape[-1] > MAX_HEAD_DIM or q.dtype == torch.float64:
        return chunk_quasar_torch(
            q, k, v, beta, initial_state, output_final_state, cu_seqlens, scale=scale
        )
    return ChunkQuasarFunction.apply(
        q, k, v, beta, initial_state, output_final_state, cu_seqlens, scale
    )


def _check_shapes(q, k, v, beta, initial_state, cu_seqlens) -> None:
    if q.ndim != 4 or k.shape != q.shape or v.shape != q.shape:
        raise ValueError(
            f"q, k and v must share one shape [B, T, H, S]; got {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    B, T, H, S = q.shape
    if beta.shape != (H,):
        raise ValueError(f"beta must have shape [{H}], one value a head; got {tuple(beta.shape)}")
    N = B if cu_seqlens is None else len(sequence_lengths(cu_seqlens, B, T))
    if initial_state is not None and initial_state.shape != (N, H, S, S):
        raise ValueError(
            f"initial_state must have shape {(N, H, S, S)}; got {tuple(initial_state.shape)}"
        )
