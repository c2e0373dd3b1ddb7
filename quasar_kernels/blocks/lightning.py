"""Lightning attention, linear attention with one fixed decay per head, by the kernels of SSD."""

from __future__ import annotations

from typing import Any

import torch
from fla.ops.quasar.arguments import check_state, expect, expect_heads, expect_sizes
from torch import Tensor

from quasar_kernels.blocks.ssd import ssd
from quasar_kernels.delta_rule import inputs


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply lightning attention (arXiv 2405.17381) to whole sequences.

    For every sequence and head h of H: S_t = exp(g_h) S_{t-1} + k_t v_t^T and o_t = scale S_t^T q_t
    with g_h = -(8 h / H) (1 - layer_idx / num_layers).

    Args:
        q, k: `[B, T, H, K]`, bf16, fp16, fp32 or fp64; T may be 0.
        v: `[B, T, H, V]`.
        layer_idx, num_layers: the layer's number, from 0, and the number of layers.
        scale: factor of the output; None is 1 / sqrt(K).
        initial_state: `[N, H, K, V]`, for N sequences (B without `cu_seqlens`); None is zero.
        output_final_state: whether to return the state after each sequence.
        cu_seqlens: `[N + 1]` int32 or int64 bounds of sequences packed in one row (B = 1).
        kwargs: `chunk_size`, which is ignored.

    Returns:
        o `[B, T, H, V]` in v's dtype, and the final state `[N, H, K, V]` fp32 (fp64 for fp64
        inputs) or None. Gradients reach q, k, v and initial_state, from both results.

    Raises:
        ValueError: an unknown option, shapes, dtypes or devices that do not fit, a layer that does
            not exist, or an unknown value of QUASAR_BACKEND or QUASAR_SSD_BACKEND.
    """
    inputs.check_options(chunk_lightning_attn, kwargs)
    sizes = layer_idx, num_layers
    return _run(q, k, v, *sizes, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Apply lightning attention (arXiv 2405.17381) for decoding.

    The kernels, arguments, results and errors are those of `chunk_lightning_attn`, and:

    Args:
        reverse: process each sequence from its last token to its first.
    """
    if not reverse:
        sizes = layer_idx, num_layers
        return _run(q, k, v, *sizes, scale, initial_state, output_final_state, cu_seqlens)
    _check(q, k, v, initial_state, cu_seqlens)
    q, k, v = (x.flip(1) for x in (q, k, v))
    if cu_seqlens is not None:  # the sequences, too, are in reverse order
        cu_seqlens = q.shape[1] - cu_seqlens.flip(0)
        initial_state = None if initial_state is None else initial_state.flip(0)
    o, final = _run(
        q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens
    )
    if final is not None and cu_seqlens is not None:
        final = final.flip(0)
    return o.flip(1), final


def _check(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    expect("q", q, ("B", "T", "H", "K"))
    B, T, H, K = q.shape
    expect("k, like q,", k, q.shape, q.device)
    expect("v", v, (B, T, H, "V"), q.device)
    expect_heads(q, v)
    check_state(initial_state, cu_seqlens, B, (H, K, v.shape[-1]), q.device)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    _check(q, k, v, initial_state, cu_seqlens)
    expect_sizes(num_layers=num_layers)
    if not 0 <= layer_idx < num_layers:
        raise ValueError(f"layer_idx must be from 0 to {num_layers - 1}; got {layer_idx}")
    B, T, H, K = q.shape
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    heads = torch.arange(H, dtype=dtype, device=q.device)
    decays = heads * -(8 / H * (1 - layer_idx / num_layers))
    steps = torch.ones(B, T, H, dtype=dtype, device=q.device)
    results: tuple[Tensor, Tensor] = ssd(v, steps, decays, k, q, None, initial_state, cu_seqlens)
    o, final = results
    return o * (K**-0.5 if scale is None else scale), final if output_final_state else None
