"""The SSD operator of Mamba-2 by kernels of this project, mamba_ssm or fla-core, or by torch."""

from __future__ import annotations

import torch
from fla.ops.quasar.arguments import check_state, expect
from torch import Tensor

from quasar_kernels.blocks.backends import Kernels, Operator, imported
from quasar_kernels.blocks.chunked import decayed_attention

TRITON = "quasar_kernels.blocks.ssd_triton.launch"


@torch.compiler.disable  # it would compile the loops over chunks for minutes
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply SSD (arXiv 2405.21060) to whole sequences.

    For every sequence and head: S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T and
    y_t = S_t^T C_t + D x_t.

    Args:
        x: `[batch, T, H, P]`, bf16, fp16, fp32 or fp64; T may be 0.
        dt: `[batch, T, H]`, step sizes, not negative, best in fp32.
        A: `[H]`, rates of decay, negative.
        B, C: `[batch, T, G, N]`; H / G adjacent heads share each of the G groups.
        D: `[H]`, the skip's factors, or None for none.
        initial_state: `[sequences, H, N, P]`; None is zero.
        cu_seqlens: `[sequences + 1]` bounds of sequences packed in one row (batch = 1).

    Returns:
        y `[batch, T, H, P]` in x's dtype, and the final state `[sequences, H, N, P]` in fp32 (fp64
        for fp64). Gradients reach all tensors, from both results.

    Raises:
        ValueError: an argument is not a tensor, a dtype is not supported, shapes or devices do not
            match, or QUASAR_BACKEND or QUASAR_SSD_BACKEND has an unknown value.
    """
    expect("x", x, ("batch", "T", "H", "P"))
    batch, T, H, P = x.shape
    expect("B", B, (batch, T, "G", "N"), x.device)
    G, N = B.shape[2:]
    if not G or H % G:
        raise ValueError(f"the heads of x must be a multiple of B's groups; got {H} and {G}")
    expect("C", C, B.shape, x.device)
    expect("dt", dt, (batch, T, H), x.device)
    expect("A", A, (H,), x.device)
    if D is not None:
        expect("D", D, (H,), x.device)
    check_state(initial_state, cu_seqlens, batch, (H, N, P), x.device)
    arguments = x, dt, A, B, C, D, initial_state, cu_seqlens
    return OPERATOR(x, cu_seqlens is not None, *arguments, width=N, values=P, tokens=T)


def _as_attention(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values, and log decays `[batch, T, H]`."""
    group = x.shape[2] // B.shape[2]
    q, k = (y.repeat_interleave(group, 2) for y in (C, B))
    return q, k, (x * dt[..., None]).to(x.dtype), dt * A


def _skipped(y: Tensor, D: Tensor | None, x: Tensor) -> Tensor:
    return y if D is None else y + (D[:, None] * x).to(x.dtype)


def _in_torch(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    q, k, v, g = _as_attention(x.to(wide), dt.to(wide), A.to(wide), B, C)
    o, final = decayed_attention(q, k, v, g[..., None], None, state, bounds)
    return _skipped(o.to(x.dtype), D, x), final


def _by_mamba(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    _bounds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    # mamba_ssm's states are transposed
    initial = None if state is None else state.mT.contiguous()
    options = {"D": D, "initial_states": initial, "return_final_states": True}
    y, final = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size=256, **options)
    return y.to(x.dtype), final.mT.float()


def _by_fla(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v, g = _as_attention(x, dt, A, B, C)
    initial = None if state is None else state.float()
    packed = None if bounds is None else bounds.to(x.device, torch.int64)
    options = {"initial_state": initial, "output_final_state": True, "cu_seqlens": packed}
    o, final = chunk_simple_gla(q, k, v, g=g.float(), scale=1.0, **options)
    return _skipped(o.to(x.dtype), D, x), final.float()


OPERATOR = Operator(
    "SSD",
    [
        Kernels("triton", TRITON, "install Triton", imported(TRITON, "ssd_triton"), widest=128),
        Kernels(
            "mamba_ssm",
            "mamba_ssm.ops.triton.ssd_combined",
            "install mamba_ssm",
            _by_mamba,
            packed=False,
            tuned=True,
        ),
        Kernels(
            "fla-core", "fla.ops.simple_gla", "install fla-core 0.6 and Triton", _by_fla, tuned=True
        ),
    ],
    _in_torch,
)
