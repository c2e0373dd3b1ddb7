"""SSD by the Triton kernels: their tiles, launches, and autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from fla.ops.quasar.device import on_its_device
from fla.ops.quasar.triton_kernels.launch import Launcher, padded
from torch import Tensor

from quasar_kernels.blocks.autograd import Kernels
from quasar_kernels.blocks.ssd_triton.backward import gradient_kernel
from quasar_kernels.blocks.ssd_triton.forward import (
    output_kernel,
    segment_sum_kernel,
    step_kernel,
)
from quasar_kernels.blocks.triton_segments.launches import Launches
from quasar_kernels.blocks.triton_segments.plan import LaunchOptions, Plan, Shape, Tiles, apply

LAUNCHES = Launches(
    *map(Launcher, (segment_sum_kernel, output_kernel, gradient_kernel, step_kernel))
)


def tiles_for(N: int, P: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles for a state of N and heads of P channels, of a dtype."""
    keys, values = (padded(n, 16) for n in (N, P))
    precision = "tf32" if dtype == torch.float16 else "tf32x3"
    if dtype == torch.bfloat16:
        options = LaunchOptions(4, 2), LaunchOptions(4, 2), LaunchOptions(8, 1)
        return Tiles(keys, min(64, values), 64, *options, precision)
    options = LaunchOptions(4, 1), LaunchOptions(4, 1), LaunchOptions(8, 1)
    return Tiles(keys, min(32, values), 16, *options, precision)


def padded_state(N: int, dtype: torch.dtype) -> int:
    """Return the state size to which a state of size N is padded for the kernels.

    With Triton 3.6 on an H200, bf16 kernels gave wrong final states for a state of 16 with tiles of
    16 and of 32 keys. So bf16 uses the tested sizes 64 and 128; padding with zeros does not change
    the result.
    """
    return N if dtype != torch.bfloat16 else 64 if N <= 64 else 128


class Inputs(NamedTuple):
    """A call's tensors; in x, B and C heads are adjacent, and tokens any distance apart."""

    x: Tensor  # [batch, T, H, P]
    dt: Tensor  # [batch, T, H] fp32, contiguous
    A: Tensor  # [H] fp32
    B: Tensor  # [batch, T, G, N] in x's dtype
    C: Tensor  # the same
    D: Tensor | None  # [H] fp32

    @property
    def strides(self) -> tuple[int, int, int]:
        """Elements between tokens of x, B and C."""
        return self.x.stride(1), self.B.stride(1), self.C.stride(1)

    @property
    def constants(self) -> tuple[int, ...]:
        """The number of groups, which share B and C."""
        return (self.B.shape[2],)

    @property
    def values(self) -> Tensor:
        """The tensor with the output's shape and dtype."""
        return self.x

    def summed(self, do: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Return the arguments of segment_sum_kernel, as `Launches` explains."""
        x, y = (self.B, self.x) if do is None else (self.C, do)
        return (x, y, self.dt, self.A), (x.stride(1), y.stride(1))


def backward(
    plan: Plan, inputs: Inputs, kept: Tensor, dy: Tensor, d_final: Tensor | None, initial: bool
) -> tuple[Inputs, Tensor | None]:
    """Return the gradients of the inputs, and of the initial state if there is one.

    dy and d_final, the gradients of the results, are contiguous, and d_final is fp32.
    """
    x, _, _, B, _, D = inputs
    batch, T, H, N, _ = plan.shape
    total, parts, G = plan.segments.total, plan.grid[1], B.shape[2]

    def shares(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((parts, *shape), dtype=dtype, device=x.device)

    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    db, dc = (shares(batch, T, H, N, dtype=B.dtype) for _ in range(2))
    d_dt = shares(batch, T, H)
    da, dd = shares(total, H), None if D is None else shares(total, H)
    call = plan, inputs, kept, dy, d_final, initial
    d_initial = LAUNCHES.backward(*call, (dx, d_dt, da, db, dc, dd), batch * T, total)

    def of_groups(share: Tensor) -> Tensor:
        if parts == 1 and G == H:
            return share[0]
        return share.unflatten(3, (G, H // G)).sum((0, 4), dtype=torch.float32).to(share.dtype)

    of_steps = d_dt[0] if parts == 1 else d_dt.sum(0)
    of_skip = None if dd is None else dd.sum((0, 1))
    gradients = Inputs(dx, of_steps, da.sum((0, 1)), of_groups(db), of_groups(dc), of_skip)
    return gradients, d_initial


KERNELS = Kernels(Inputs, LAUNCHES.forward, backward)


def _in_rows(x: Tensor) -> Tensor:
    """Return x `[batch, T, heads, width]` with adjacent heads and one stride between tokens."""
    batch, T, _, width = x.shape
    row = x.stride(1)
    strides = (T * row if batch > 1 else x.stride(0), row, width, 1)
    return x if x.stride() == strides and row > 0 else x.contiguous()


@torch.compiler.disable
@on_its_device
def ssd_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    segments: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply SSD by the Triton kernels, differentiably; as `blocks.ssd.ssd`, on a GPU.

    x, B and C may be columns of one projection: they are read in place. A call recorded by autograd
    keeps the state before every chunk for its backward pass. For heads of 64 channels and a state
    of 64 in bf16, these states have as many bytes as x.

    Args:
        segments: replaces the built-in number of segments of each sequence.

    Raises:
        ValueError: `cu_seqlens` does not cut one row of T tokens.
    """
    N = B.shape[-1]
    over = padded_state(N, x.dtype) - N
    if over:
        B, C = (F.pad(y, (0, over)) for y in (B, C))
        initial_state = None if initial_state is None else F.pad(initial_state, (0, 0, 0, over))
    x, B, C = (_in_rows(y.to(x.dtype)) for y in (x, B, C))
    skip = None if D is None else D.float().contiguous()
    inputs = Inputs(x, dt.float().contiguous(), A.float().contiguous(), B, C, skip)
    batch, T, H, P = x.shape
    shape = Shape(batch, T, H, B.shape[-1], P)
    tiles = tiles_for(shape.K, P, x.dtype)
    y, final = apply(
        KERNELS, LAUNCHES.one_token, shape, tiles, inputs, initial_state, cu_seqlens, segments
    )
    return y, final[:, :, :N]
