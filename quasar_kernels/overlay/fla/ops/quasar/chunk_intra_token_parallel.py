"""The part of the chunk form inside one chunk: alpha and A = (I + strict_tril(a K K^T))^-1.

The columns of A are independent of one another: column j is a forward substitution that starts at
token j. So a chunk is spread over programs by its tokens, and a short sequence or a small batch,
which has few chunks, still fills a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from fla.ops.quasar.chunk_torch import sequence_lengths
from fla.ops.quasar.forward_substitution import quasar_forward_substitution
from fla.ops.quasar.gate import fused_quasar_gate
from fla.ops.quasar.gate import quasar_step_size

MAX_HEAD_DIM = 128
"""Widest head that the Triton kernel holds in registers; wider heads take the torch path."""


@triton.jit(do_not_specialize=["T", "NT"])
def chunk_quasar_intra_kernel(
    k,
    beta,
    A,
    alpha,
    table,
    T,
    NT,
    stride_kb,
    stride_kt,
    stride_kh,
    H: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Write BC columns of one chunk's A, and its alpha; grid: (rows * NT * H, C / BC).

    `table` holds (first token, tokens) of each chunk of a packed row.
    """
    i_c, i_h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    if IS_VARLEN:
        i_b = i_c * 0
        first = tl.load(table + 2 * i_c)
        length = tl.load(table + 2 * i_c + 1)
    else:
        i_b = i_c // NT
        first = (i_c % NT) * C
        length = tl.minimum(T - first, C)
    rows, feats = tl.arange(0, C), tl.arange(0, BS)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    p_k = k + i_b * stride_kb + first * stride_kt + i_h * stride_kh
    p_k += rows[:, None] * stride_kt + feats[None, :]
    mask = (rows < length)[:, None] & (feats < S)[None, :]
    b_k = tl.load(p_k, mask=mask, other=0.0).to(tl.float32)
    b_beta = tl.load(beta + i_h).to(tl.float32)
    b_alpha = quasar_step_size(tl.sum(b_k * b_k, axis=1), b_beta)

    # [C, C] strictly lower part; the substitution needs every row, whatever the columns
    M = b_alpha[:, None] * tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
    M = tl.where(rows[:, None] > rows[None, :], M, 0.0)
    X = tl.where(rows[:, None] == cols[None, :], 1.0, 0.0)  # [C, BC], column block of A
    for i in range(1, C):
        m_i = tl.sum(tl.where(rows[:, None] == i, M, 0.0), axis=0)
        x_i = tl.sum(m_i[:, None] * X, axis=0)
        X -= tl.where(rows[:, None] == i, x_i[None, :], 0.0)

    token = (i_b * T + first + rows) * H + i_h
    tl.store(A + token[:, None] * C + cols[None, :], X, mask=(rows < length)[:, None])
    if tl.program_id(1) == 0:
        tl.store(alpha + token, b_alpha, mask=rows < length)


def launch_chunk_intra(
    k: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; no autograd. `chunk_size` is a power of two from 16 to 128."""
    B, T, H, S = k.shape
    k = k if k.stride(-1) == 1 else k.contiguous()
    A = torch.empty(B, T, H, chunk_size, dtype=torch.float32, device=k.device)
    alpha = torch.empty(B, T, H, dtype=torch.float32, device=k.device)
    table, NT = None, triton.cdiv(T, chunk_size)
    if cu_seqlens is not None:
        table = _chunk_table(cu_seqlens, B, T, chunk_size)
        NT = table.shape[0]
    if B * NT * H:
        columns = 16
        chunk_quasar_intra_kernel[(B * NT * H, chunk_size // columns)](
            k, beta.contiguous(), A, alpha, table, T, NT, *k.stride()[:3],
            H=H, S=S, BS=max(16, triton.next_power_of_2(S)), C=chunk_size, BC=columns,
            IS_VARLEN=cu_seqlens is not None, num_warps=4, num_stages=1,
        )  # fmt: skip
    return A, alpha


def _chunk_table(cu_seqlens: torch.Tensor, B: int, T: int, chunk_size: int) -> torch.Tensor:
    chunks, first = [], 0
    for length in sequence_lengths(cu_seqlens, B, T):
        stop = first + length
        chunks += [(t, min(chunk_size, stop - t)) for t in range(first, stop, chunk_size)]
        first = stop
    return torch.tensor(chunks, dtype=torch.int64, device=cu_seqlens.device).view(-1, 2)


def chunk_intra_torch(
    k: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same in torch, differentiably; fp32, or fp64 for fp64 keys."""
    B, T, H, S = k.shape
    k = k if k.dtype == torch.float64 else k.float()
    alpha = fused_quasar_gate(k.square().sum(-1), beta.to(k.dtype), k.dtype)
    lengths = [T] if cu_seqlens is None else sequence_lengths(cu_seqlens, B, T)
    parts = []
    for k_n, alpha_n in zip(k.split(lengths, 1), alpha.split(lengths, 1), strict=True):
        length = k_n.shape[1]
        NT = triton.cdiv(length, chunk_size)
        pad = NT * chunk_size - length  # zero keys leave the other rows of A as they are
        keys = F.pad(k_n, (0, 0, 0, 0, 0, pad)).view(B, NT, chunk_size, H, S).transpose(2, 3)
        step = F.pad(alpha_n, (0, 0, 0, pad)).view(B, NT, chunk_size, H).transpose(2, 3)
        A = quasar_forward_substitution(step[..., None] * (keys @ keys.mT))
        parts.append(A.transpose(2, 3).reshape(B, NT * chunk_size, H, chunk_size)[:, :length])
    return torch.cat(parts, dim=1), alpha


class ChunkIntraFunction(torch.autograd.Function):
    """The kernel forwards; backwards the torch path, computed again and differentiated."""

    @staticmethod
    def forward(ctx, k, beta, cu_seqlens, chunk_size):
        ctx.save_for_backward(k, beta, cu_seqlens)
        ctx.chunk_size = chunk_size
        fits = chunk_size in (16, 32, 64, 128) and k.shape[-1] <= MAX_HEAD_DIM
        if k.is_cuda and k.dtype != torch.float64 and fits:
            with torch.cuda.device(k.device):
                return launch_chunk_intra(k, beta, cu_seqlens, chunk_size)
        with torch.autocast(k.device.type, enabled=False):
            return chunk_intra_torch(k, beta, cu_seqlens, chunk_size)

    @staticmethod
    @once_differentiable
    def backward(ctx, dA, dalpha):
        k, beta, cu_seqlens = ctx.saved_tensors
        leaves = k.detach().requires_grad_(), beta.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(k.device.type, enabled=False):
            outputs = chunk_intra_torch(*leaves, cu_seqlens, ctx.chunk_size)
            dk, dbeta = torch.autograd.grad(outputs, leaves, (dA, dalpha))
        return dk, dbeta, None, None


@torch.compiler.disable
def chunk_quasar_intra(
    k: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the part of the chunk form that needs no state, for every chunk at once.

    Args:
        k: `[B, T, H, S]`, any floating dtype, any strides.
        beta: `[H]`, positive.
        cu_seqlens: `[N + 1]` bounds of sequences packed in one row (B = 1); chunks start anew at
            each sequence.
        chunk_size: C, tokens of a chunk.

    Returns:
        A `[B, T, H, C]`: the row of token t in (I + strict_tril(a K K^T))^-1 of its chunk, and the
        step sizes alpha `[B, T, H]`; both fp32 (fp64 for fp64 keys). Gradients reach k and beta.

    Raises:
        ValueError: `cu_seqlens` does not cut one row of T tokens.
    """
    return ChunkIntraFunction.apply(k, beta, cu_seqlens, chunk_size)
