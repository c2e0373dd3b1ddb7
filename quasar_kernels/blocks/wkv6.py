"""The WKV6 operator of RWKV-6: this project's or fla-core's kernels on a GPU, else PyTorch."""

from __future__ import annotations

import torch
from fla.ops.quasar.arguments import check_state, expect
from torch import Tensor

from quasar_kernels.blocks.backends import Kernels, Operator, imported
from quasar_kernels.blocks.chunked import decayed_attention

CUDA = "quasar_kernels.blocks.wkv6_cuda.launch"
TRITON = "quasar_kernels.blocks.wkv6_triton.launch"
SHORT = range(2, 17)
"""Lengths of calls for which the CUDA C++ kernel is chosen, which computes token by token.

Triton computes single tokens, and longer calls in chunks. On an H200, CUDA C++ takes 0.15 us per
token, and Triton 19 us for 256 tokens.
"""


@torch.compiler.disable  # it would compile the loops over chunks for minutes
def wkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply WKV6 (arXiv 2404.05892) to whole sequences.

    For every sequence and head: o_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t, then
    S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T.

    Args:
        r, k: `[B, T, H, K]`, bf16, fp16, fp32 or fp64; T may be 0.
        v: `[B, T, H, V]`.
        w: `[B, T, H, K]`, log decays, not positive, best in fp32.
        u: `[H, K]`, the bonus of the current token.
        initial_state: `[N, H, K, V]`, for N sequences (B without `cu_seqlens`); None is zero.
        cu_seqlens: `[N + 1]` bounds of packed sequences (B = 1).

    Returns:
        o `[B, T, H, V]` in v's dtype, and the final state `[N, H, K, V]` in fp32 (fp64 for fp64).
        Both results have gradients with respect to all tensors.

    Raises:
        ValueError: an argument is not a tensor, shapes, dtypes or devices do not match, or
            QUASAR_BACKEND or QUASAR_WKV6_BACKEND has an unknown value.
    """
    expect("r", r, ("B", "T", "H", "K"))
    B, T, H, K = r.shape
    expect("k", k, r.shape, r.device)
    expect("w", w, r.shape, r.device)
    expect("v", v, (B, T, H, "V"), r.device)
    expect("u", u, (H, K), r.device)
    check_state(initial_state, cu_seqlens, B, (H, K, v.shape[-1]), r.device)
    arguments = r, k, v, w, u, initial_state, cu_seqlens
    return OPERATOR(v, cu_seqlens is not None, *arguments, width=K, values=v.shape[-1], tokens=T)


def _by_fla(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    state: Tensor | None,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from fla.ops.rwkv6 import chunk_rwkv6

    initial = None if state is None else state.float()
    packed = None if bounds is None else bounds.to(v.device, torch.int64)
    options = {"initial_state": initial, "output_final_state": True, "cu_seqlens": packed}
    o, final = chunk_rwkv6(r, k, v, w, u, scale=1.0, **options)
    return o.to(v.dtype), final.to(torch.float32)


OPERATOR = Operator(
    "WKV6",
    [
        Kernels("cuda", CUDA, "", imported(CUDA, "wkv6_cuda"), widths=(32, 64, 128), tokens=SHORT),
        Kernels("triton", TRITON, "install Triton", imported(TRITON, "wkv6_triton"), widest=128),
        Kernels(
            "fla-core", "fla.ops.rwkv6", "install fla-core 0.6 and Triton", _by_fla, tuned=True
        ),
    ],
    decayed_attention,
)
