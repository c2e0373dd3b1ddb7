"""WKV6 by the Triton kernels: tiles, launches and autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from fla.ops.quasar.device import on_its_device
from fla.ops.quasar.triton_kernels.launch import Launcher, padded
from torch import Tensor

from quasar_kernels.blocks.autograd import Kernels
from quasar_kernels.blocks.triton_segments.launches import Launches
from quasar_kernels.blocks.triton_segments.plan import LaunchOptions, Plan, Shape, Tiles, apply
from quasar_kernels.blocks.wkv6_triton.backward import gradient_kernel
from quasar_kernels.blocks.wkv6_triton.forward import (
    output_kernel,
    segment_sum_kernel,
    step_kernel,
)

LAUNCHES = Launches(
    *map(Launcher, (segment_sum_kernel, output_kernel, gradient_kernel, step_kernel))
)


def tiles_for(K: int, V: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles for heads of K channels of r and k, V channels of v, and a dtype."""
    keys, values = (padded(n, 16) for n in (K, V))
    precision = "tf32" if dtype == torch.float16 else "tf32x3"
    if dtype == torch.bfloat16 and keys <= 64:
        options = LaunchOptions(4, 2), LaunchOptions(4, 2), LaunchOptions(8, 1)
        return Tiles(keys, min(64, values), 32, *options, precision)
    if dtype == torch.bfloat16:
        # with Triton 3.6 on an H200, 8 warps on 16 tokens and 64 values gave wrong gradients
        gradient_warps = 8 if values >= 128 else 4
        options = LaunchOptions(4, 1), LaunchOptions(4, 1), LaunchOptions(gradient_warps, 1)
        return Tiles(keys, min(128, values), 16, *options, precision)
    options = LaunchOptions(4, 1), LaunchOptions(8, 1), LaunchOptions(8, 1)
    return Tiles(keys, min(32, values), 16, *options, precision)


class Inputs(NamedTuple):
    """A call's tensors, all contiguous."""

    r: Tensor  # [B, T, H, K]
    k: Tensor  # the same
    v: Tensor  # [B, T, H, V] in the same dtype
    w: Tensor  # [B, T, H, K]
    u: Tensor  # [H, K]

    @property
    def strides(self) -> tuple[int, ...]:
        """Empty, because heads and tokens are adjacent."""
        return ()

    @property
    def constants(self) -> tuple[int, ...]:
        """Empty, because no heads share r, k or w."""
        return ()

    @property
    def values(self) -> Tensor:
        """The tensor with the output's shape and dtype."""
        return self.v

    def summed(self, do: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Return the arguments of segment_sum_kernel, as `Launches` explains."""
        return ((self.k, self.v) if do is None else (self.r, do)) + (self.w,), ()


def backward(
    plan: Plan, x: Inputs, kept: Tensor, do: Tensor, d_final: Tensor | None, initial: bool
) -> tuple[Inputs, Tensor | None]:
    """Return the gradients of the inputs, and of the initial state if there is one.

    do and d_final, the gradients of the results, are contiguous, and d_final is fp32.
    """
    B, T, H, K, _ = plan.shape
    r, k, v, w, u = x
    parts = plan.grid[1]

    def parts_of(x: Tensor) -> Tensor:
        kind = x.dtype if parts == 1 else torch.float32
        return torch.empty((parts, *x.shape), dtype=kind, device=x.device)

    dr, dk, dw, dv = parts_of(r), parts_of(k), parts_of(w), torch.empty_like(v)
    du = u.new_empty((parts * plan.segments.total, H, K), dtype=torch.float32)
    gradients = dr, dk, dv, dw, du
    d_initial = LAUNCHES.backward(plan, x, kept, do, d_final, initial, gradients, B * T)

    def whole(x: Tensor, like: Tensor) -> Tensor:
        return x[0] if parts == 1 else x.sum(0).to(like.dtype)

    d_u = du.sum(0).to(u.dtype)
    return Inputs(whole(dr, r), whole(dk, k), dv, whole(dw, w), d_u), d_initial


KERNELS = Kernels(Inputs, LAUNCHES.forward, backward)


@torch.compiler.disable
@on_its_device
def wkv6_triton(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    segments: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply WKV6 by the Triton kernels, differentiably; as `blocks.wkv6.wkv6`, on a GPU.

    For gradients, the state before each chunk is kept, which for heads of 64 in bf16 takes twice
    the bytes of v.

    Args:
        segments: replaces the built-in number of segments of each sequence.

    Raises:
        ValueError: the bounds `cu_seqlens` do not fit one row of T tokens.
    """
    dtype = v.dtype
    r, k, v = (x.to(dtype).contiguous() for x in (r, k, v))
    inputs = Inputs(r, k, v, w.contiguous(), u.contiguous())
    B, T, H, K = r.shape
    shape = Shape(B, T, H, K, v.shape[-1])
    tiles = tiles_for(shape.K, shape.V, dtype)
    return apply(
        KERNELS, LAUNCHES.one_token, shape, tiles, inputs, initial_state, cu_seqlens, segments
    )
