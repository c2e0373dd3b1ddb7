"""QuasarAttention's chunk form in torch: the path of CPU tensors and of the gradients.

A chunk of C tokens (row = token, a = diag(alpha)) turns the state S into S':

    M = strict_tril(a K K^T)    U = (I + M)^-1 a V    W = (I + M)^-1 a K
    V' = U - W S                O = Q S + tril(Q K^T) V'                S' = S + K^T V'

Everything but V' and S' is computed for all chunks at once; only those two walk chunk by chunk.
Long sequences go block by block, and autograd keeps only the state between blocks: a block is
computed again in the backward pass.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fla.ops.quasar.gate import fused_quasar_gate

BLOCK_ELEMENTS = 1 << 23
"""Elements of a tensor in a block: 16,384 tokens of 8 heads of 64, 32 MB of fp32."""


@torch.compiler.disable
def chunk_quasar_torch(
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
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply QuasarAttention to whole sequences, on any device, differentiably.

    Arguments and results are those of `chunk_quasar`. The arithmetic is fp32 (fp64 for fp64
    inputs) whatever autocast says.

    Args:
        chunk_size: tokens of a chunk; changes the rounding only.

    Raises:
        ValueError: `cu_seqlens` does not cut one row of T tokens.
    """
    B, T, H, S = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lengths = [T] if cu_seqlens is None else sequence_lengths(cu_seqlens, B, T)
    N = B if cu_seqlens is None else len(lengths)
    with torch.autocast(q.device.type, enabled=False):
        if use_qk_l2norm_in_kernel:
            q, k = l2norm(q), l2norm(k)
        if initial_state is None:
            state = torch.zeros(N, H, S, S, dtype=dtype, device=q.device)
        else:
            state = initial_state.to(dtype)
        beta = beta.to(dtype)
        rows = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
        states = [state] if cu_seqlens is None else state.split(1)
        results = [
            _sequence(*parts, beta, entering, scale, chunk_size)
            for parts, entering in zip(rows, states, strict=True)
        ]
        o = torch.cat([q[:, :0], *(o for o, _ in results)], dim=1)
        final = torch.cat([state[:0], *(s for _, s in results)])
    return o, final if output_final_state else None


def sequence_lengths(cu_seqlens: torch.Tensor, B: int, T: int) -> list[int]:
    """Return the lengths of the sequences packed in one row of T tokens, or raise ValueError."""
    bounds = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if B != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, so B must be 1; got B = {B}")
    if bounds[:1] != [0] or bounds[-1:] != [T] or min(lengths, default=-1) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to T = {T}; got {bounds}")
    return lengths


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Return x with rows of unit length, rounded to x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _sequence(q, k, v, beta, state, scale, chunk_size):
    """Run the batch rows of one sequence each: block by block, recomputed in the backward pass."""
    B, T, H, S = q.shape
    block = max(1, BLOCK_ELEMENTS // (B * H * max(S, chunk_size) * chunk_size)) * chunk_size
    if T <= block:
        return _block(q, k, v, beta, state, scale, chunk_size)
    outputs = []
    for parts in zip(*(x.split(block, 1) for x in (q, k, v)), strict=True):
        arguments = (*parts, beta, state, scale, chunk_size)
        if torch.is_grad_enabled():
            o, state = checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            o, state = _block(*arguments)
        outputs.append(o)
    return torch.cat(outputs, dim=1), state


def _block(q, k, v, beta, state, scale, C):
    """Return o and the state after a run of tokens; state is `[B, H, S, S]` in beta's dtype."""
    B, T, H, S = q.shape
    if B * T * H == 0:
        return torch.zeros_like(q), state
    dtype, out_dtype, NT = beta.dtype, q.dtype, -(-T // C)

    def chunks(x):  # [B, T, H, D] -> [NT, B * H, C, D]; padding with zero keys changes nothing
        x = F.pad(x, (0, 0, 0, 0, 0, NT * C - T)) if T % C else x
        x = x.reshape(B, NT, C, H, x.shape[-1]).permute(1, 0, 3, 2, 4)
        return x.to(dtype).reshape(NT, B * H, C, -1)

    alpha = chunks(fused_quasar_gate(k.to(dtype).square().sum(-1, keepdim=True), beta, dtype))
    q, k, v = chunks(q), chunks(k), chunks(v)
    # the solver reads the part below the diagonal alone and takes the diagonal as ones
    L = alpha * (k @ k.mT)
    right = alpha * torch.cat([v, k], dim=-1)
    U, W = torch.linalg.solve_triangular(L, right, upper=False, unitriangular=True).split(S, -1)

    S_n = state.reshape(B * H, S, S)
    entering, fresh = [], []
    for k_n, U_n, W_n in zip(k.unbind(0), U.unbind(0), W.unbind(0), strict=True):
        entering.append(S_n)
        fresh.append(torch.baddbmm(U_n, W_n, S_n, alpha=-1))
        S_n = torch.baddbmm(S_n, k_n.mT, fresh[-1])
    o = q @ torch.stack(entering) + torch.tril(q @ k.mT) @ torch.stack(fresh)
    o = (o * scale).view(NT, B, H, C, S).permute(1, 0, 3, 2, 4).reshape(B, NT * C, H, S)
    return o[:, :T].to(out_dtype), S_n.view(B, H, S, S)
