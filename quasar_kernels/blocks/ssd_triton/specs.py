"""The compile specs of SSD's kernels, as data: see quasar_kernels/compile_specs.py."""

from __future__ import annotations

from typing import Any

import torch

from quasar_kernels.blocks.ssd_triton import backward, forward, launch, step
from quasar_kernels.blocks.triton_segments.plan import STEP_WARPS, Walk, step_values
from quasar_kernels.compile_specs import CompileSpec, typed


def ssd_specs(architecture: int = 90) -> list[CompileSpec]:
    """Return the kernels for heads and a state of 64 in bf16, on Hopper also of 128 and in fp32."""
    specs = []
    for kind, dtype, N in (
        ("bf16", torch.bfloat16, 64),
        ("bf16", torch.bfloat16, 128),
        ("fp32", torch.float32, 64),
    ):
        if architecture != 90 and (kind, N) != ("bf16", 64):
            continue  # compiled for one architecture only, because that takes long
        tiles = launch.tiles_for(N, 64, dtype)
        sizes: dict[str, Any] = {"G": 1, "H": 8, "K": N, "V": 64, "BK": tiles.keys}
        tile = sizes | {"BV": tiles.values, "C": tiles.chunk}
        tile |= {"PRECISION": tiles.precision, "IS_VARLEN": False, "table": None}
        cut = typed("i32", "T NS SEG")
        head = typed("*fp32", "dt a")
        call = head | typed(f"*{kind}", "x b c") | typed("*fp32", "d states") | cut
        call |= typed("i32", "X_STRIDE B_STRIDE C_STRIDE") | {"checkpoints": f"*{kind}"}
        rows: list[tuple[Any, dict[str, str], dict[str, Any], Walk]] = [
            (
                forward.segment_sum_kernel,
                head
                | typed(f"*{kind}", "x y")
                | typed("*fp32", "sums decays")
                | cut
                | typed("i32", "X_STRIDE Y_STRIDE"),
                tile | {"REVERSE": False},
                tiles.sum,
            ),
            (
                forward.output_kernel,
                call | {"y": f"*{kind}"} | typed("*fp32", "initial_state final_state"),
                tile,
                tiles.output,
            ),
            (
                backward.gradient_kernel,
                call
                | typed(f"*{kind}", "dy dx db dc")
                | typed("i32", "TOTAL SEGMENTS")
                | typed("*fp32", "d_dt da dd d_final d_initial"),
                tile,
                tiles.gradient,
            ),
            (
                step.step_kernel,
                head
                | typed(f"*{kind}", "x b c y")
                | typed("*fp32", "d initial_state final_state")
                | typed("i32", "X_STRIDE B_STRIDE C_STRIDE"),
                sizes | {"BV": step_values(tiles, 64)},
                Walk(STEP_WARPS, 1),
            ),
        ]
        specs += [
            CompileSpec(
                f"ssd {kernel.fn.__name__.removesuffix('_kernel')} {kind} N={N}",
                kernel,
                types,
                constants,
                *walk,
            )
            for kernel, types, constants, walk in rows
        ]
    return specs
