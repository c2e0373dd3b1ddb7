"""The launches that WKV6 and SSD share: the arguments of their kernels have the same order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from fla.ops.quasar.triton_kernels.launch import Launcher, padded
from torch import Tensor

from quasar_kernels.blocks.autograd import Forward
from quasar_kernels.blocks.triton_segments.kernels import segment_scan_kernel
from quasar_kernels.blocks.triton_segments.plan import Plan, Shape, Tiles

STEPS = 16
"""Segments that the scan loads at once."""
STEP_WARPS = 4
"""Warps of a program that processes a single token."""

_scan = Launcher(segment_scan_kernel)


def step_values(tiles: Tiles, V: int) -> int:
    """Return how many of V value columns one program computes for a single token."""
    return min(padded(V), max(16, 4096 // tiles.keys))


class Launches(NamedTuple):
    """The kernels of one operator, launched on the current stream.

    Its `Inputs` have the properties `values`, a tensor with the output's shape and dtype, and
    `strides` and `constants`, which precede those of the plan in the kernels' arguments.
    `summed(do)` returns segment_sum_kernel's tensors and strides, without `do` for the state, with
    `do` for its gradient.
    """

    segment_sum: Launcher
    output: Launcher
    gradient: Launcher
    step: Launcher

    def forward(self, plan: Plan, x: Any, initial_state: Tensor | None, keep: bool) -> Forward:
        """Compute a call; `initial_state` is contiguous fp32.

        With `keep`, return the states before all chunks, `[chunks, H, V, K]`: bf16 for bf16 values.
        """
        _, _, H, K, V = plan.shape
        states, values = self._segment_states(plan, x, None, initial_state), x.values
        o, final = torch.empty_like(values, memory_format=torch.contiguous_format), _states(plan, x)
        kind = torch.bfloat16 if values.dtype == torch.bfloat16 else torch.float32
        kept = values.new_empty((plan.chunks, H, V, K), dtype=kind) if keep else None
        self.output(
            plan.grid,
            (*x, o, states, initial_state, final, kept, plan.segments.table, *x.strides,
             *plan.sizes),
            (*x.constants, *plan.constants, plan.tiles.precision, plan.packed),
            **plan.tiles.output._asdict(),
        )  # fmt: skip
        return Forward(o, final, kept)

    def backward(
        self,
        plan: Plan,
        x: Any,
        kept: Tensor,
        do: Tensor,
        d_final: Tensor | None,
        initial: bool,
        gradients: tuple[Tensor | None, ...],
        *sizes: int,
    ) -> Tensor | None:
        """Write the gradients of the inputs; return that of the initial state if there is one."""
        states = self._segment_states(plan, x, do, d_final)
        d_initial = _states(plan, x) if initial else None
        self.gradient(
            plan.grid,
            (*x, do, *gradients, states, d_final, d_initial, kept, plan.segments.table,
             *x.strides, *sizes, *plan.sizes),
            (*x.constants, *plan.constants, plan.tiles.precision, plan.packed),
            **plan.tiles.gradient._asdict(),
        )  # fmt: skip
        return d_initial

    def one_token(
        self, shape: Shape, x: Any, initial_state: Tensor | None, tiles: Tiles
    ) -> tuple[Tensor, Tensor]:
        """Process the only token of each sequence; `initial_state` is contiguous fp32."""
        B, _, H, K, V = shape
        o = torch.empty_like(x.values, memory_format=torch.contiguous_format)
        final = o.new_empty((B, H, K, V), dtype=torch.float32)
        columns = step_values(tiles, V)
        self.step(
            (B * H, -(-V // columns), 1),
            (*x, o, initial_state, final, *x.strides),
            (*x.constants, H, K, V, tiles.keys, columns),
            num_warps=STEP_WARPS,
            num_stages=1,
        )
        return o, final

    def _segment_states(
        self, plan: Plan, x: Any, do: Tensor | None, entering: Tensor | None
    ) -> Tensor | None:
        """Return the state after each segment, `[segments, H, V, K]`.

        With `do`, the gradient of the state before each segment. None if no sequence has several
        segments. `entering` is the first state of each sequence, or None for zero.
        """
        if not plan.several:
            return None
        _, _, H, K, V = plan.shape
        cut, tiles, reverse = plan.segments, plan.tiles, do is not None
        tensors, strides = x.summed(do)
        sums = tensors[0].new_empty((cut.total, H, V, K), dtype=torch.float32)
        decays = sums.new_empty((cut.total, H, K))
        self.segment_sum(
            plan.grid,
            (*tensors, cut.table, sums, decays, *strides, *plan.sizes),
            (*x.constants, *plan.constants, tiles.precision, reverse, plan.packed),
            **tiles.sum._asdict(),
        )
        _scan(
            (cut.sequences * H, V, 1),
            (sums, decays, entering, cut.first, cut.per_sequence),
            (H, K, V, tiles.keys, STEPS, reverse, plan.packed),
            num_warps=1,
            num_stages=1,
        )
        return sums


def _states(plan: Plan, x: Any) -> Tensor:
    """Allocate a state of each sequence, `[N, H, K, V]` fp32."""
    shape = (plan.segments.sequences, *plan.shape[2:])
    states: Tensor = x.values.new_empty(shape, dtype=torch.float32)
    return states
