"""The compile specs of WKV6's and SSD's kernels, as data: see quasar_kernels/compile_specs.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quasar_kernels.blocks.ssd_triton import backward as ssd_backward
from quasar_kernels.blocks.ssd_triton import forward as ssd_forward
from quasar_kernels.blocks.ssd_triton import launch as ssd_launch
from quasar_kernels.blocks.triton_segments.kernels import segment_scan_kernel
from quasar_kernels.blocks.triton_segments.launches import STEP_WARPS, STEPS, step_values
from quasar_kernels.blocks.triton_segments.plan import LaunchOptions, Tiles
from quasar_kernels.blocks.wkv6_triton import backward as wkv6_backward
from quasar_kernels.blocks.wkv6_triton import forward as wkv6_forward
from quasar_kernels.blocks.wkv6_triton import launch as wkv6_launch
from quasar_kernels.compile_specs import CompileSpec, typed

Row = tuple[Any, dict[str, str], dict[str, Any], LaunchOptions]
"""A kernel with the types of its arguments, its constants and its compile options."""
CUT = typed("i32", "T NS SEG")


def block_specs(architecture: int = 90) -> Iterator[CompileSpec]:
    """Yield the kernels for heads and states of 64 in bf16.

    For Hopper, also yield those of 128 in bf16 and those of 64 in fp32.
    """
    kinds = [("bf16", torch.bfloat16, 64)]
    if architecture == 90:  # these take long to compile, so only for one architecture
        kinds += [("bf16", torch.bfloat16, 128), ("fp32", torch.float32, 64)]
    for kind, dtype, K in kinds:
        for operator, size, rows in (
            ("wkv6", "S", _wkv6_rows(kind, K, wkv6_launch.tiles_for(K, K, dtype))),
            ("ssd", "N", _ssd_rows(kind, K, ssd_launch.tiles_for(K, 64, dtype))),
        ):
            for kernel, types, constants, options in rows:
                name = kernel.fn.__name__.removesuffix("_kernel")
                label = f"{operator} {name} {kind} {size}={K}"
                yield CompileSpec(label, kernel, types, constants, *options)


def _tile(sizes: dict[str, Any], tiles: Tiles) -> dict[str, Any]:
    tile = sizes | {"BV": tiles.values, "C": tiles.chunk, "PRECISION": tiles.precision}
    return tile | {"IS_VARLEN": False, "table": None}


def _wkv6_rows(kind: str, K: int, tiles: Tiles) -> Iterator[Row]:
    sizes: dict[str, Any] = {"H": 8, "K": K, "V": K, "BK": tiles.keys}
    tile = _tile(sizes, tiles)
    states = typed("*fp32", "w u states") | {"checkpoints": f"*{kind}"} | CUT
    yield (
        wkv6_forward.segment_sum_kernel,
        typed(f"*{kind}", "x y") | typed("*fp32", "w sums decays") | CUT,
        tile | {"REVERSE": False},
        tiles.sum,
    )
    yield (
        segment_scan_kernel,
        typed("*fp32", "sums decays entering") | {"NS": "i32"},
        sizes | {"STEPS": STEPS, "REVERSE": False} | {"IS_VARLEN": False, "first": None},
        LaunchOptions(1, 1),
    )
    yield (
        wkv6_forward.output_kernel,
        typed(f"*{kind}", "r k v o") | states | typed("*fp32", "initial_state final_state"),
        tile,
        tiles.output,
    )
    yield (
        wkv6_backward.gradient_kernel,
        typed(f"*{kind}", "r k v do dv") | states | {"TOTAL": "i32"}
        | typed("*fp32" if tiles.values < K else f"*{kind}", "dr dk")
        | typed("*fp32", "dw du d_final d_initial"),
        tile,
        tiles.gradient,
    )  # fmt: skip
    yield (
        wkv6_forward.step_kernel,
        typed(f"*{kind}", "r k v o") | typed("*fp32", "w u initial_state final_state"),
        sizes | {"BV": step_values(tiles, K)},
        LaunchOptions(STEP_WARPS, 1),
    )


def _ssd_rows(kind: str, N: int, tiles: Tiles) -> Iterator[Row]:
    sizes: dict[str, Any] = {"G": 1, "H": 8, "K": N, "V": 64, "BK": tiles.keys}
    tile = _tile(sizes, tiles)
    head, strides = typed("*fp32", "dt a"), typed("i32", "X_STRIDE B_STRIDE C_STRIDE")
    call = head | typed(f"*{kind}", "x b c") | typed("*fp32", "d states") | CUT | strides
    call |= {"checkpoints": f"*{kind}"}
    yield (
        ssd_forward.segment_sum_kernel,
        head | typed(f"*{kind}", "x y") | typed("*fp32", "sums decays") | CUT
        | typed("i32", "X_STRIDE Y_STRIDE"),
        tile | {"REVERSE": False},
        tiles.sum,
    )  # fmt: skip
    yield (
        ssd_forward.output_kernel,
        call | {"y": f"*{kind}"} | typed("*fp32", "initial_state final_state"),
        tile,
        tiles.output,
    )
    yield (
        ssd_backward.gradient_kernel,
        call | typed(f"*{kind}", "dy dx db dc") | typed("i32", "TOTAL SEGMENTS")
        | typed("*fp32", "d_dt da dd d_final d_initial"),
        tile,
        tiles.gradient,
    )  # fmt: skip
    yield (
        ssd_forward.step_kernel,
        head | typed(f"*{kind}", "x b c y") | typed("*fp32", "d initial_state final_state")
        | strides,
        sizes | {"BV": step_values(tiles, 64)},
        LaunchOptions(STEP_WARPS, 1),
    )  # fmt: skip
