"""The compile specs of WKV6's kernels, as data: see quasar_kernels/compile_specs.py."""

from __future__ import annotations

from typing import Any

import torch

from quasar_kernels.blocks.triton_segments.kernels import segment_scan_kernel
from quasar_kernels.blocks.triton_segments.plan import STEP_WARPS, STEPS, Walk, step_values
from quasar_kernels.blocks.wkv6_triton import backward, forward, launch, step
from quasar_kernels.compile_specs import CompileSpec, typed


def wkv6_specs(architecture: int = 90) -> list[CompileSpec]:
    """Return the kernels for heads of 64 in bf16, on Hopper also for wide heads and in fp32."""
    specs = []
    for kind, dtype, K in (
        ("bf16", torch.bfloat16, 64),
        ("bf16", torch.bfloat16, 128),
        ("fp32", torch.float32, 64),
    ):
        if architecture != 90 and (kind, K) != ("bf16", 64):
            continue  # compiled for one architecture only, because that takes long
        tiles = launch.tiles_for(K, K, dtype)
        sizes: dict[str, Any] = {"H": 8, "K": K, "V": K, "BK": tiles.keys}
        tile = sizes | {"BV": tiles.values, "C": tiles.chunk}
        tile |= {"PRECISION": tiles.precision, "IS_VARLEN": False, "table": None}
        cut = typed("i32", "T NS SEG")
        states = typed("*fp32", "w u states") | {"checkpoints": f"*{kind}"} | cut
        rows: list[tuple[Any, dict[str, str], dict[str, Any], Walk]] = [
            (
                forward.segment_sum_kernel,
                typed(f"*{kind}", "x y") | typed("*fp32", "w sums decays") | cut,
                tile | {"REVERSE": False},
                tiles.sum,
            ),
            (
                segment_scan_kernel,
                typed("*fp32", "sums decays entering") | {"NS": "i32"},
                sizes | {"STEPS": STEPS, "REVERSE": False} | {"IS_VARLEN": False, "first": None},
                Walk(1, 1),
            ),
            (
                forward.output_kernel,
                typed(f"*{kind}", "r k v o") | states | typed("*fp32", "initial_state final_state"),
                tile,
                tiles.output,
            ),
            (
                backward.gradient_kernel,
                typed(f"*{kind}", "r k v do dv")
                | states
                | {"TOTAL": "i32"}
                | typed("*fp32" if tiles.values < K else f"*{kind}", "dr dk")
                | typed("*fp32", "dw du d_final d_initial"),
                tile,
                tiles.gradient,
            ),
            (
                step.step_kernel,
                typed(f"*{kind}", "r k v o") | typed("*fp32", "w u initial_state final_state"),
                sizes | {"BV": step_values(tiles, K)},
                Walk(STEP_WARPS, 1),
            ),
        ]
        specs += [
            CompileSpec(
                f"wkv6 {kernel.fn.__name__.removesuffix('_kernel')} {kind} S={K}",
                kernel,
                types,
                constants,
                *walk,
            )
            for kernel, types, constants, walk in rows
        ]
    return specs
