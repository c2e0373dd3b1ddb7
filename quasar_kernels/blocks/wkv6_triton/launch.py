"""WKV6 by the Triton kernels: tiles, launches and autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from fla.ops.quasar.device import on_its_device
from fla.ops.quasar.triton_kernels.launch import Launcher
from torch import Tensor

from quasar_kernels.blocks.autograd import Forward, Kernels
from quasar_kernels.blocks.triton_segments.plan import (
    STEP_WARPS,
    LaunchOptions,
    Plan,
    Shape,
    Tiles,
    apply,
    checkpoints_for,
    segment_states,
    states_of_caller,
    step_values,
)
from quasar_kernels.blocks.wkv6_triton.backward import gradient_kernel
from quasar_kernels.blocks.wkv6_triton.forward import (
    output_kernel,
    segment_sum_kernel,
)
from quasar_kernels.blocks.wkv6_triton.step import step_kernel

_sum, _output, _gradient = map(Launcher, (segment_sum_kernel, output_kernel, gradient_kernel))
_step = Launcher(step_kernel)


def tiles_for(K: int, V: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles for heads of K channels of r and k, V channels of v, and a dtype."""
    keys, values = (max(16, triton.next_power_of_2(n)) for n in (K, V))
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


def forward(plan: Plan, x: Inputs, initial_state: Tensor | None, keep: bool) -> Forward:
    """Launch the forward pass on the current stream; `initial_state` is contiguous fp32."""
    r, k, v, w, u = x
    cut, tiles = plan.segments, plan.tiles
    states = segment_states(plan, _sum, (k, v, w), (), (), initial_state, False)
    o = torch.empty_like(v)
    final = states_of_caller(plan, v.device)
    checkpoints = checkpoints_for(plan, v) if keep else None
    _output(
        plan.grid,
        (r, k, v, w, u, o, states, initial_state, final, checkpoints, cut.table, *plan.sizes),
        (*plan.constants, tiles.precision, plan.packed),
        num_warps=tiles.output.num_warps,
        num_stages=tiles.output.num_stages,
    )
    return Forward(o, final, checkpoints)


def backward(
    plan: Plan, x: Inputs, checkpoints: Tensor, do: Tensor, d_final: Tensor | None, initial: bool
) -> tuple[Inputs, Tensor | None]:
    """Return the gradients of the inputs, and of the initial state if there is one.

    do and d_final, the gradients of the results, are contiguous, and d_final is fp32.
    """
    B, T, H, K, _ = plan.shape
    r, k, v, w, u = x
    cut, parts = plan.segments, plan.grid[1]
    states = segment_states(plan, _sum, (r, do, w), (), (), d_final, True)

    def parts_of(x: Tensor) -> Tensor:
        kind = x.dtype if parts == 1 else torch.float32
        return torch.empty((parts, *x.shape), dtype=kind, device=x.device)

    dr, dk, dw, dv = parts_of(r), parts_of(k), parts_of(w), torch.empty_like(v)
    du = torch.empty((parts * cut.total, H, K), dtype=torch.float32, device=u.device)
    d_initial = states_of_caller(plan, v.device) if initial else None
    _gradient(
        plan.grid,
        (r, k, v, w, u, do, dr, dk, dv, dw, du, states, d_final, d_initial, checkpoints, cut.table,
         B * T, *plan.sizes),
        (*plan.constants, plan.tiles.precision, plan.packed),
        num_warps=plan.tiles.gradient.num_warps, num_stages=plan.tiles.gradient.num_stages,
    )  # fmt: skip

    def whole(x: Tensor, like: Tensor) -> Tensor:
        return x[0] if parts == 1 else x.sum(0).to(like.dtype)

    d_u = du.sum(0).to(u.dtype)
    return Inputs(whole(dr, r), whole(dk, k), dv, whole(dw, w), d_u), d_initial


def step(x: Inputs, initial_state: Tensor | None, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Process the only token of each sequence; `initial_state` is contiguous fp32."""
    B, _, H, K = x.r.shape
    V = x.v.shape[-1]
    o = torch.empty_like(x.v)
    final = torch.empty((B, H, K, V), dtype=torch.float32, device=o.device)
    values = step_values(tiles, V)
    _step(
        (B * H, triton.cdiv(V, values), 1),
        (*x, o, initial_state, final),
        (H, K, V, tiles.keys, values),
        num_warps=STEP_WARPS,
        num_stages=1,
    )
    return o, final


KERNELS = Kernels(Inputs, forward, backward)


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
    return apply(KERNELS, step, shape, tiles, inputs, initial_state, cu_seqlens, segments)
