"""Build pass 1 and the scan of the CUDA kernels for a CPU, from their own sources, and run them.

It is the code of GPUs without `wgmma`. What is PTX is replaced by emulated/warp.h, function by
function; everything else is compiled as it stands.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quasar_kernels.contract import OVERLAY
from tests import processes

_CUDA = OVERLAY / "fla/ops/quasar/cuda"
_HERE = Path(__file__).with_name("emulated")
THREADS = _HERE / "warp.h"
"""The threads of a block and what they do together, as C++ to include first."""
_SOURCES = (
    "csrc/entry.cuh",
    "csrc/fragments.cuh",
    "scan/csrc/segments.cuh",
    "scan/csrc/chunk.cuh",
    "scan/csrc/map_chunk.cuh",
    "scan/csrc/copies.cuh",
    "scan/csrc/segment_map.cu",
    "scan/csrc/segment_scan.cu",
)

_BF16 = "T == Scalar::bf16"
BODIES = {
    "u32 pack(": f"return packed({_BF16}, low, high);",
    "u32 pack_saturated(": f"if ({_BF16}) return pack<T>(low, high); "
    "return pack<T>(saturated(low), saturated(high));",
    "void unpack(": f"unpacked({_BF16}, x, low, high);",
    "void mma(": f"product16({_BF16}, d, a, b0, b1);",
    "void mma_half(": f"product16({_BF16}, d, {{a0, a1, 0, 0}}, b, 0);",
    "void mma_8x8(": "product16(false, d, {a, 0, 0, 0}, b, 0);",
    "void mma_tf32(": "product_tf32(d, a, b0, b1);",
    "void load_rows(": "load_matrices(out, address, false);",
    "void load_columns(": "load_matrices(out, address, true);",
    "void copy16(": "copy_piece(to, from, true);",
    "void commit_loads(": "",
    "void wait_loads(": "",
    "float exp2_of(": "return exp2f(x);",
    "float exponential(": "return expf(x);",
    "u32 multiply_fp16(": "return multiplied(false, a, b);",
    "u32 multiply_bf16(": "return multiplied(true, a, b);",
    "void store(u32 from, int token, int channel) const {\n    unsigned": "abort();",
    "void clear_rows(": "abort();",
}
"""What functions of PTX do here, by how their definitions begin."""

STATEMENTS = {
    "ex2.approx": "power = exp2f(x * -1.44269504f);",
    "rcp.approx": "inverse = 1 / (lambda + 1e-8f);",
    "sqrt.approx": "root = sqrtf(size);",
    "st.shared.u32": "store_word(to, x[i]);",
    "cp.async.cg.shared.global [%0], [%1], 16, %2": "copy_piece(to + offset(i), "
    "from + 4 * i * stride, token + 4 * i < tokens);",
}
"""The same of statements within larger functions, by an instruction in them."""


class Maps(NamedTuple):
    """What the kernels leave, each `[segments, H, S, S]` fp32; the last segment's is unwritten."""

    G: Tensor
    R: Tensor
    states: Tensor  # behind each segment


def build(folder: Path, width: int, steps: tuple[str, ...] = ()) -> Path:
    """Compile the program for heads of `width` channels into `folder`; some seconds.

    `steps` are options as `forward.step_options` gives them.
    """
    parts = [on_cpu((_CUDA / name).read_text()) for name in _SOURCES]
    program = folder / "-".join(("emulated", str(width), *steps))
    source = program.with_suffix(".cpp")
    lines = [f'#include "{THREADS}"', *parts, f'#include "{_HERE}/main.h"']
    source.write_text("\n".join(lines))
    options = ("-std=c++20", "-O1", "-w", f"-DQUASAR_HEAD={width}", *steps)
    processes.run("g++", *options, "-o", program, source, check=True)
    return program


def run(
    program: Path, folder: Path, k: Tensor, v: Tensor, beta: Tensor, segments: int, length: int
) -> Maps:
    """Run it for k, v `[T, H, S]` in bf16 or fp16, cut into `segments` of `length` tokens.

    `beta` is `[H]`, or what `forward.given_steps` gives.
    """
    T, H, S = k.shape
    for name, x in (("k", k.view(torch.int16)), ("v", v.view(torch.int16)), ("beta", beta)):
        x.contiguous().numpy().tofile(folder / name)
    dtype = "bf16" if k.dtype == torch.bfloat16 else "fp16"
    processes.run(program, folder, dtype, T, H, segments, length, check=True)
    results = (np.fromfile(folder / name, np.float32) for name in ("maps", "offsets", "states"))
    return Maps(*(torch.from_numpy(x).view(segments, H, S, S) for x in results))


def on_cpu(text: str) -> str:
    """Return a source's text without includes, and with what is PTX replaced."""
    text = re.sub(r'#(include "[^"]*"|pragma once)\n', "", text)
    text = re.sub(r"\*\)raw\b", "*)quasar::raw", text)  # one memory for all kernels
    for start, body in BODIES.items():
        text = _with_body(text, start, body)
    for instruction, statement in STATEMENTS.items():
        pattern = rf'asm( volatile)?\("{re.escape(instruction)}[^"]*"[^;]*;'
        text = re.sub(pattern, statement.replace("\\", r"\\"), text)
    return text


def _with_body(text: str, start: str, body: str) -> str:
    found = text.find(" " + start)
    if found < 0:
        return text
    opening = text.index("{", text.index(")", found))
    depth = 0
    for place in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return f"{text[:opening]}{{ {body} }}{text[place + 1 :]}"
    raise ValueError(f"{start} has no end")
