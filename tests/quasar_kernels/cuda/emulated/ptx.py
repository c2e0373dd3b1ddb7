"""Translates CUDA C++ to C++: PTX statements become calls of functions in this folder's headers."""

from __future__ import annotations

import re

FUNCTIONS = {
    "cvt.rn.bf16x2.f32": "pack_pair<true>",
    "cvt.rn.f16x2.f32": "pack_pair<false>",
    "cvt.rn.satfinite.bf16x2.f32": "pack_finite_pair<true>",
    "cvt.rn.satfinite.f16x2.f32": "pack_finite_pair<false>",
    "{.reg .b16 l, h; mov.b32 {l, h}": "unpack_pair<false>",
    "min.NaN.f16x2": "choose_pair<true>",
    "max.NaN.f16x2": "choose_pair<false>",
    "mul.rn.f16x2": "multiply_pair<false>",
    "fma.rn.bf16x2": "multiply_pair<true>",
    "fma.rn.f16x2": "add_product_pair<false>",
    "ex2.approx.ftz.f32": "find_exp2",
    "rcp.approx.ftz.f32": "find_inverse",
    "sqrt.approx.ftz.f32": "find_root",
    "rsqrt.approx.ftz.f32": "find_inverse_root",
    "tanh.approx.f32": "find_tanh",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "product16<true>",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "product16<false>",
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32": "product8<true>",
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32": "product8<false>",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": "product_tf32",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "load_matrices<false>",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": "load_matrices<true>",
    "movmatrix.sync.aligned.m8n8.trans.b16": "transpose_matrix",
    "st.shared.u32": "store_word",
    "st.shared.v4.u32": "store_four",
    "ld.shared.v4.u32": "load_four",
    "ld.shared.v2.f32": "load_two",
    "ld.global.nc.v4.u32": "load_device",
    "ld.global.nc.L1::no_allocate.v4.f32": "load_device",
    "prefetch.global.L2": "prefetch",
    "bar.sync": "join_barrier",
    "cp.async.cg.shared.global": "copy_piece",
    "cp.async.commit_group": "close_group",
    "cp.async.wait_group": "wait_groups",
}
"""The function for a statement, by the start of its PTX; its arguments are the operands, results
first."""


def on_cpu(text: str) -> str:
    """Return a source for g++, to be included after memory.h.

    PTX that only Hopper has is not translated: the preprocessor drops that code.
    """
    text = re.sub(r"\*\)raw\b", "*)quasar::raw", text)  # the shared memory of memory.h
    text = re.sub(r"const __grid_constant__ (\w+) ", r"const \1& ", text)
    parts, end = [], 0
    for match in re.finditer(r"\basm(?: volatile)?\(", text):
        parts.append(text[end : match.start()])
        end = _closing(text, match.end() - 1) + 1
        parts.append(_call(text[match.end() : end - 1]) or text[match.start() : end])
    return "".join([*parts, text[end:]])


def _call(statement: str) -> str | None:
    instructions, *operands = _sections(statement)
    ptx = "".join(re.findall(r'"([^"]*)"', instructions))
    for start, function in FUNCTIONS.items():
        if re.match(re.escape(start) + r"\W", ptx):
            values = [value for section in operands[:2] for value in _values(section)]
            return f"{function}({', '.join(values)})"
    return None


def _sections(statement: str) -> list[str]:
    """Split at the colons outside of strings and brackets."""
    bare = re.sub(r'"[^"]*"', lambda m: "_" * len(m[0]), statement)
    sections, begin, depth = [], 0, 0
    for place, letter in enumerate(bare):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == ":" and depth == 0:
            sections.append(statement[begin:place])
            begin = place + 1
    return [*sections, statement[begin:]]


def _values(section: str) -> list[str]:
    """Return the expressions of operands, which stand in brackets after a constraint."""
    starts = [match.end() - 1 for match in re.finditer(r'"[^"]*"\s*\(', section)]
    return [section[start + 1 : _closing(section, start)] for start in starts]


def _closing(text: str, opening: int) -> int:
    """Return the position at which the bracket at `opening` is closed, ignoring strings."""
    depth, quoted = 0, False
    for place in range(opening, len(text)):
        quoted ^= text[place] == '"'
        depth += 0 if quoted else {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"a bracket is never closed: {text[opening : opening + 80]}")
