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

from fla.ops.quasar.chunk_torch import chunk_quasar_torch

MAX_HEAD_DIM = 128
"""Widest head that the Triton kernels hold in registers; wider heads take the torch path."""


@triton.jit
def _operand(x, DTYPE: tl.constexpr):
    # fp16 saturates instead of turning into infinity
    if DTYPE == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(DTYPE)


@triton.jit
def _step_size(lam, beta):
    # (1 - exp(-x)) / (lam + eps) with x = beta lam; the series keeps the digits of a small x
    x = beta * lam
    series = x * (1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6 * (1 - x / 7))))))
    return tl.where(x < 0.25, series, 1 - tl.exp(-x)) / (lam + 1e-8)


@triton.jit
def _join_blocks(A, M, rows, cols, HALF: tl.constexpr, PRECISION: tl.constexpr):
    # inverses of the HALF x HALF diagonal blocks -> inverses of the 2 HALF x 2 HALF blocks
    below = (rows // (2 * HALF) == cols // (2 * HALF)) & (rows // HALF > cols // HALF)
    off = tl.where(below, M, 0.0)
    return A - tl.dot(tl.dot(A, off, input_precision=PRECISION), A, input_precision=PRECISION)


@triton.jit
def _chunk_inverse(k, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return a [C] and A = (I + strict_tril(a K K^T))^-1 [C, C], both fp32, of one chunk's keys."""
    rows = tl.arange(0, C)[:, None]
    cols = tl.arange(0, C)[None, :]
    k32 = k.to(tl.float32)
    a = _step_size(tl.sum(k32 * k32, axis=1), beta)
    M = a[:, None] * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    M = tl.where(rows > cols, M, 0.0)
    # the 2 x 2 blocks need no product
    A = tl.where(rows == cols, 1.0, 0.0) - tl.where(rows // 2 == cols // 2, M, 0.0)
    A = _join_blocks(A, M, rows, cols, 2, PRECISION)
    A = _join_blocks(A, M, rows, cols, 4, PRECISION)
    A = _join_blocks(A, M, rows, cols, 8, PRECISION)
    if C >= 32:
        A = _join_blocks(A, M, rows, cols, 16, PRECISION)
    if C >= 64:
        A = _join_blocks(A, M, rows, cols, 32, PRECISION)
    return a, A


@triton.jit
def _segment(table, i_s, T, NS, SEG, IS_VARLEN: tl.constexpr):
    """Return batch row, sequence, first token, tokens, is first, is last of segment i_s."""
    if IS_VARLEN:
        row = table + i_s * 4
        i_n = tl.load(row)
        t0 = tl.load(row + 1)
        length = tl.load(row + 2)
        place = tl.load(row + 3)
        return i_n * 0, i_n, t0, length.to(tl.int32), (place & 1) != 0, (place & 2) != 0
    else:
        i_n = (i_s // NS).to(tl.int64)
        i = i_s % NS
        t0 = i.to(tl.int64) * SEG
        length = tl.minimum(T - t0, SEG).to(tl.int32)
        return i_n, i_n, t0, length, i == 0, i == NS - 1


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def segment_map_kernel(
    k,
    v,
    beta,
    table,
    G_out,
    R_out,
    T,
    NS,
    SEG,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    H: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BR: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Rows of G and R of one segment and head, scanned from the segment's last chunk to its first.

    Backward, G (I, at the end) absorbs a chunk by Z = G K^T, Y = Z A diag(a), R += Y V, G -= Y K:
    four products a chunk, each row of G on its own. Grid: (segments * H, S / BR).
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_r = tl.program_id(1)
    i_b, _, t0, length, _, is_last = _segment(table, i_s, T, NS, SEG, IS_VARLEN)
    if is_last:
        return  # no segment starts from the state behind a sequence's last one
    beta_h = tl.load(beta + i_h).to(tl.float32)
    rows = tl.arange(0, C)
    cols = tl.arange(0, BS)
    r = i_r * BR + tl.arange(0, BR)

    n_chunks = tl.cdiv(length, C)
    left = length - (n_chunks - 1) * C  # tokens in the chunk at hand: full ones follow
    t_last = t0 + (n_chunks - 1).to(tl.int64) * C
    p_k = (
        k
        + i_b * stride_kb
        + t_last * stride_kt
        + i_h * stride_kh
        + rows[:, None] * stride_kt
        + cols[None, :]
    )
    p_v = (
        v
        + i_b * stride_vb
        + t_last * stride_vt
        + i_h * stride_vh
        + rows[:, None] * stride_vt
        + cols[None, :]
    )

    G = tl.where(r[:, None] == cols[None, :], 1.0, 0.0)
    R = tl.zeros([BR, BS], dtype=tl.float32)
    for _ in range(0, n_chunks):
        mask = (rows < left)[:, None] & (cols < S)[None, :]
        b_k = tl.load(p_k, mask=mask, other=0.0)
        b_v = tl.load(p_v, mask=mask, other=0.0)
        a, A = _chunk_inverse(b_k, beta_h, C, INVERSE)
        Z = tl.dot(_operand(G, b_k.dtype), tl.trans(b_k), input_precision=PRECISION)
        Y = tl.dot(
            _operand(Z, b_k.dtype), _operand(A * a[None, :], b_k.dtype), input_precision=PRECISION
        )
        Y = _operand(Y, b_k.dtype)
        R += tl.dot(Y, b_v, input_precision=PRECISION)
        G -= tl.dot(Y, b_k, input_precision=PRECISION)
        left = C
        p_k -= C * stride_kt
        p_v -= C * stride_vt

    out = (tl.program_id(0).to(tl.int64) * S * S) + r[:, None] * S + cols[None, :]
    inside = (r < S)[:, None] & (cols < S)[None, :]
    tl.store(G_out + out, G, mask=inside)
    tl.store(R_out + out, R, mask=inside)


@triton.jit(do_not_specialize=["NS"])
def segment_scan_kernel(
    G,
    R,
    initial_state,
    first,
    NS,
    H: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Turn the maps of a sequence's segments into states: R[n] becomes the state after segment n.

    Grid: (sequences * H, S / BV); each program owns BV value columns of one head's state.
    """
    i_n, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    if IS_VARLEN:
        s0 = tl.load(first + i_n)
        s1 = tl.load(first + i_n + 1)
    else:
        s0 = i_n.to(tl.int64) * NS
        s1 = s0 + NS
    rows = tl.arange(0, BS)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = (rows < S)[:, None] & (cols < S)[None, :]
    square = (rows < S)[:, None] & (rows < S)[None, :]
    at = rows[:, None] * S + cols[None, :]
    state = tl.zeros([BS, BV], dtype=tl.float32)
    if HAS_INITIAL:
        state += tl.load(
            initial_state + tl.program_id(0).to(tl.int64) * S * S + at, mask=inside, other=0.0
        )
    p_G = G + (s0 * H + i_h) * S * S + rows[:, None] * S + rows[None, :]
    p_R = R + (s0 * H + i_h) * S * S + at
    for _ in range(0, (s1 - s0 - 1).to(tl.int32)):
        b_G = tl.load(p_G, mask=square, other=0.0)
        b_R = tl.load(p_R, mask=inside, other=0.0)
        state = tl.dot(b_G, state, input_precision="tf32x3") + b_R
        tl.store(p_R, state, mask=inside)
        p_G += H * S * S
        p_R += H * S * S


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def segment_output_kernel(
    q,
    k,
    v,
    beta,
    table,
    states,
    initial_state,
    final_state,
    o,
    T,
    NS,
    SEG,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    H: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Walk one segment of one head from its entering state and write o (and the final state).

    A chunk: D = a (V - K S), V' = A D, O = Q S + tril(Q K^T) V', S += K^T V'; everything but the
    reads of q, k, v and the write of o stays on chip. Grid: (segments * H, S / BV).
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_b, i_n, t0, length, is_first, is_last = _segment(table, i_s, T, NS, SEG, IS_VARLEN)
    beta_h = tl.load(beta + i_h).to(tl.float32)
    rows = tl.arange(0, C)
    cols = tl.arange(0, BS)
    v_cols = tl.program_id(1) * BV + tl.arange(0, BV)
    p_q = (
        q
        + i_b * stride_qb
        + t0 * stride_qt
        + i_h * stride_qh
        + rows[:, None] * stride_qt
        + cols[None, :]
    )
    p_k = (
        k
        + i_b * stride_kb
        + t0 * stride_kt
        + i_h * stride_kh
        + rows[:, None] * stride_kt
        + cols[None, :]
    )
    p_v = (
        v
        + i_b * stride_vb
        + t0 * stride_vt
        + i_h * stride_vh
        + rows[:, None] * stride_vt
        + v_cols[None, :]
    )
    p_o = (
        o
        + i_b * stride_ob
        + t0 * stride_ot
        + i_h * stride_oh
        + rows[:, None] * stride_ot
        + v_cols[None, :]
    )

    inside = (cols < S)[:, None] & (v_cols < S)[None, :]
    at = cols[:, None] * S + v_cols[None, :]
    own = (i_n * H + i_h) * S * S  # this sequence's place in [N, H, S, S]
    state = tl.zeros([BS, BV], dtype=tl.float32)
    if is_first:
        if HAS_INITIAL:
            state += tl.load(initial_state + own + at, mask=inside, other=0.0)
    else:
        before = (tl.program_id(0) - H).to(tl.int64) * S * S  # the segment before, same head
        state += tl.load(states + before + at, mask=inside, other=0.0)

    left = length
    for _ in range(0, tl.cdiv(length, C)):
        mask = (rows < left)[:, None] & (cols < S)[None, :]
        v_mask = (rows < left)[:, None] & (v_cols < S)[None, :]
        b_q = tl.load(p_q, mask=mask, other=0.0)
        b_k = tl.load(p_k, mask=mask, other=0.0)
        b_v = tl.load(p_v, mask=v_mask, other=0.0)
        a, A = _chunk_inverse(b_k, beta_h, C, INVERSE)
        b_s = _operand(state, b_k.dtype)
        D = a[:, None] * (b_v.to(tl.float32) - tl.dot(b_k, b_s, input_precision=PRECISION))
        V = tl.dot(_operand(A, b_k.dtype), _operand(D, b_k.dtype), input_precision=PRECISION)
        V = _operand(V, b_k.dtype)
        QK = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        QK = _operand(tl.where(rows[:, None] >= rows[None, :], QK, 0.0), b_k.dtype)
        O = tl.dot(b_q, b_s, input_precision=PRECISION) + tl.dot(QK, V, input_precision=PRECISION)
        tl.store(p_o, (O * scale).to(o.dtype.element_ty), mask=v_mask)
        state += tl.dot(tl.trans(b_k), V, input_precision=PRECISION)
        left -= C
        p_q += C * stride_qt
        p_k += C * stride_kt
        p_v += C * stride_vt
        p_o += C * stride_ot

    if STORE_FINAL:
        if is_last:
            tl.store(final_state + own + at, state, mask=inside)


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
    return Tiles(16, block, 2, 1, 16, 4, block, 1, 2)


@functools.cache
def _programs_per_wave(device: torch.device) -> int:
    # eight one-warp programs of about 255 registers fill a multiprocessor
    if device.type != "cuda":
        return 16
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count


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
        BV=tiles.value_cols, HAS_INITIAL=initial_state is not None, STORE_FINAL=output_final_state,
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


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


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
        q, k = _l2norm(q), _l2norm(k)
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
    B, _, H, S = q.shape
    if beta.shape != (H,):
        raise ValueError(f"beta must have shape [{H}], one value a head; got {tuple(beta.shape)}")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, so B must be 1; got B = {B}")
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is not None and initial_state.shape != (N, H, S, S):
        raise ValueError(
            f"initial_state must have shape {(N, H, S, S)}; got {tuple(initial_state.shape)}"
        )
