"""The Triton kernel of WKV6 for one token of each sequence: the state is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_kernel(
    r, k, v, w, u, o, initial_state, final_state,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute the output and the next state of one sequence and head for BV columns of the values.

    r, k and w are `[B, 1, H, K]`, v and o `[B, 1, H, V]`, states `[B, H, K, V]`; `initial_state`
    may be None. All arithmetic is fp32. Grid: (B * H, cdiv(V, BV)).
    """
    i_nh = tl.program_id(0).to(tl.int64)
    c_k = tl.arange(0, BK)
    c_v = tl.program_id(1) * BV + tl.arange(0, BV)
    in_k, in_v = c_k < K, c_v < V
    place = i_nh * K * V + c_k[:, None] * V + c_v[None, :]
    mask = in_k[:, None] & in_v[None, :]
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if initial_state is not None:
        state = tl.load(initial_state + place, mask=mask, other=0.0)
    b_r = tl.load(r + i_nh * K + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_k = tl.load(k + i_nh * K + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_w = tl.load(w + i_nh * K + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_u = tl.load(u + i_nh % H * K + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_nh * V + c_v, mask=in_v, other=0.0).to(tl.float32)
    out = tl.sum(b_r[:, None] * state, 0) + tl.sum(b_r * b_u * b_k) * b_v
    tl.store(o + i_nh * V + c_v, out.to(o.dtype.element_ty), mask=in_v)
    state = tl.exp(b_w)[:, None] * state + b_k[:, None] * b_v[None, :]
    tl.store(final_state + place, state, mask=mask)
