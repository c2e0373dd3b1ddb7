"""The compile specs of KDA's kernels, as data: see quasar_kernels/compile_specs.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quasar_kernels.compile_specs import CompileSpec, typed
from quasar_kernels.delta_rule.kda_triton.backward import input_grad_kernel, state_grad_kernel
from quasar_kernels.delta_rule.kda_triton.forward import chunk_kernel, walk_kernel
from quasar_kernels.delta_rule.kda_triton.launch import tiles_for


def kda_specs(architecture: int = 90) -> Iterator[CompileSpec]:
    """Yield the kernels for heads of 128 in bf16, on Hopper also of 64 and in fp32.

    The tiles are those of all GPUs: Hopper's own need more shared memory than others have.
    """
    kinds = [("bf16", torch.bfloat16, 128)]
    if architecture == 90:  # the others are compiled for one architecture only: it takes long
        kinds += [("bf16", torch.bfloat16, 64), ("fp32", torch.float32, 128)]
    for kind, dtype, S in kinds:
        tiles = tiles_for(S, dtype, (8, 0))
        shared: dict[str, Any] = {"H": 8, "S": S, "BS": S, "C": tiles.chunk}
        shared |= {"PRECISION": "tf32x3" if kind == "fp32" else "tf32"}
        shared |= {"IS_VARLEN": False, "table": None}
        by_chunk, walk = {"SHARED": 1, "BK": tiles.keys}, {"BV": tiles.values}
        sizes, fp32 = typed("i32", "T NS SEG"), {"scale": "fp32"} | typed("*fp32", "g beta")
        chunks = typed(f"*{kind}", "reads writes queries scores") | {"decays": "*fp32"}
        states = typed("*fp32", "states initial_state final_state")
        outputs = typed(f"*{kind}", "o fresh checkpoints")
        walking = tiles.walk_warps, tiles.walk_stages
        for name, kernel, types, constants, launch in (
            (
                "chunk", chunk_kernel,
                chunks | typed(f"*{kind}", "q k v values inverse") | fp32,
                by_chunk, (tiles.chunk_warps, 1),
            ),
            (
                "walk", walk_kernel,
                chunks | {"values": f"*{kind}"} | states | outputs,
                walk | {"G": None, "R": None}, walking,
            ),
            (
                "map", walk_kernel,
                chunks | {"values": f"*{kind}"} | typed("*fp32", "G R"),
                walk | dict.fromkeys((*states, *outputs)), walking,
            ),
            (
                "state_grad", state_grad_kernel,
                chunks | typed(f"*{kind}", "do d_fresh d_states")
                | typed("*fp32", "entering d_final d_initial"),
                walk | {"E": None}, walking,
            ),
            (
                "input_grad", input_grad_kernel,
                typed(f"*{kind}", "q k v inverse fresh do d_fresh checkpoints d_states dq dk dv")
                | typed("*fp32", "dg d_beta") | fp32 | {"tokens": "i32"},
                by_chunk | {"BK": tiles.grad_keys}, (tiles.grad_warps, 1),
            ),
        ):  # fmt: skip
            label = f"kda {name} {kind} S={S}"
            yield CompileSpec(label, kernel, types | sizes, shared | constants, *launch)
