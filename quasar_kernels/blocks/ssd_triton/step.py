"""The Triton kernel of SSD for one token of each sequence: the state is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_kernel(
    x, dt, a, b, c, d, y, initial_state, final_state,
    X_STRIDE, B_STRIDE, C_STRIDE,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Compute the output and the next state of one sequence and head for BV columns of the values.

    The layouts are those of forward.py for one token; `initial_state` and `d` may be None. All
    arithmetic is fp32. Grid: (B * H, V / BV).
    """
    i_nh = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_nh // H, i_nh % H
    c_k = tl.arange(0, BK)
    c_v = tl.program_id(1) * BV + tl.arange(0, BV)
    in_k, in_v = c_k < K, c_v < V
    place = i_nh * K * V + c_k[:, None] * V + c_v[None, :]
    mask = in_k[:, None] & in_v[None, :]
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if initial_state is not None:
        state = tl.load(initial_state + place, mask=mask, other=0.0)
    group = i_h // (H // G) * K
    b_b = tl.load(b + i_n * B_STRIDE + group + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_c = tl.load(c + i_n * C_STRIDE + group + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_x = tl.load(x + i_n * X_STRIDE + i_h * V + c_v, mask=in_v, other=0.0).to(tl.float32)
    step = tl.load(dt + i_nh)
    state = tl.exp(step * tl.load(a + i_h)) * state + (step * b_b)[:, None] * b_x[None, :]
    out = tl.sum(b_c[:, None] * state, 0)
    if d is not None:
        out += tl.load(d + i_h) * b_x
    tl.store(y + i_nh * V + c_v, out.to(y.dtype.element_ty), mask=in_v)
    tl.store(final_state + place, state, mask=mask)
