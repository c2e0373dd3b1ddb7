"""The baseline: QuasarAttention's operator by flash-linear-attention's delta rule.

Copied over the public fork, it gives the layer of a miner who has written no kernel. torch computes
the step size, and `chunk_delta_rule` the recurrence.
"""

from __future__ import annotations

import torch
from fla.ops.delta_rule import chunk_delta_rule


def chunk_quasar(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply QuasarAttention (arXiv 2512.12602) to whole sequences.

    Args:
        q, k, v: `[B, T, H, S]`, bf16 or fp16.
        beta: `[H]`, positive.
        initial_state: `[N, H, S, S]`, key dimension first, or None for zero.
        output_final_state: whether to return the state after each sequence.
        cu_seqlens: `[N + 1]` bounds of sequences packed in one row (B = 1).

    Returns:
        o `[B, T, H, S]` and the final state `[N, H, S, S]` fp32, or None.
    """
    lam = k.float().square().sum(-1)
    alpha = -torch.expm1(-beta.float() * lam) / (lam + 1e-8)  # [B, T, H]
    return chunk_delta_rule(
        q,
        k,
        v,
        alpha,
        scale=1.0,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
