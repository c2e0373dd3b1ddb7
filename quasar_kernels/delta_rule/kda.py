"""Kimi Delta Attention, the delta rule with a decay per channel of the keys, with fla's signatures.

Whole sequences on a GPU are computed by `kda_triton`; on a CPU, in fp64 and with wider heads than
128 channels by PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fla.ops.quasar.arguments import expect, expect_number
from fla.ops.quasar.backend import has_kernels
from fla.ops.quasar.chunk_torch import chunk_quasar_torch
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.device import on_its_device
from fla.ops.quasar.fused_recurrent import run_recurrent
from fla.ops.quasar.operator_types import ScanInputs
from fla.ops.quasar.preparation import prepare
from fla.ops.quasar.switches import requested_backend
from fla.ops.quasar.traceable import traceable
from torch import Tensor

from quasar_kernels.delta_rule import inputs
from quasar_kernels.delta_rule.heads import Heads
from quasar_kernels.delta_rule.kda_triton.launch import kda_triton

MIN_SAFE_BOUND = -5.0
"""Lowest `lower_bound` that fla accepts with `safe_gate`."""


@traceable("int chunk_size=64", "Tensor? A_log=None", "Tensor? dt_bias=None", in_cuda_graphs=False)  # type: ignore[untyped-decorator]
@on_its_device  # type: ignore[untyped-decorator]
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,  # noqa: ARG001 # of fla's signature
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply Kimi Delta Attention (arXiv 2510.26692) to whole sequences.

    As `chunk_gated_delta_rule`, but each channel of the keys has its own decay:
    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T and
    o_t = scale S_t^T q_t. Only sums of g between tokens are exponentiated. They are not positive,
    so no decay can overflow.

    Args:
        g: `[B, T, HV, K]`, log decays, not positive; with `use_gate_in_kernel` the input of
            -exp(A_log) softplus(g + dt_bias), or, with a `lower_bound`, of
            lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        safe_gate: for fla, whether all log decays are at least -5. With `use_gate_in_kernel` it
            needs a `lower_bound` from -5 to 0. These kernels do not need it.
        lower_bound: the lowest log decay of the gate, negative.
        disable_recompute: an argument of fla's function, which is ignored.
        return_intermediate_states, use_graph, max_num_seqs: not supported.
        kwargs: A_log, `HV` values, which may be omitted with a `lower_bound`; dt_bias, `HV * K`
            values; the older name of `state_v_first`; and `chunk_size`, which is ignored.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the final state as `chunk_delta_rule`. Gradients reach
        q, k, v, g, beta, A_log, dt_bias and initial_state, from both results.

    Raises:
        ValueError, CudaUnavailableError, RuntimeError: as `chunk_gated_delta_rule`; or a value of
            `safe_gate`, `lower_bound` or an option that is not supported.
    """
    v_first = inputs.value_first(state_v_first, kwargs)
    inputs.check_options(chunk_kda, kwargs, "A_log", "dt_bias")
    if return_intermediate_states or use_graph or max_num_seqs is not None:
        raise ValueError(
            "return_intermediate_states, use_graph and max_num_seqs are not supported: omit them, "
            "or call fla's function of this name"
        )
    if cp_context is not None:
        cu_seqlens, cu_seqlens_cpu = cp_context.cu_seqlens, cp_context.cu_seqlens_cpu
    _check(q, k, v, g, beta, scale, initial_state, cu_seqlens, v_first)
    if use_gate_in_kernel:
        if safe_gate and (lower_bound is None or not MIN_SAFE_BOUND <= lower_bound < 0):
            raise ValueError(
                f"safe_gate=True with use_gate_in_kernel=True needs a lower_bound from "
                f"{MIN_SAFE_BOUND:g} to 0; got {lower_bound}"
            )
        g = channel_decays(g, kwargs.get("A_log"), kwargs.get("dt_bias"), lower_bound)
    how = inputs.preparation(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    bounds = inputs.bounds_on_host(cu_seqlens, cu_seqlens_cpu, q.shape[1])
    state = inputs.transpose_if(v_first, initial_state)
    q, k, beta = prepare(how, q, k, beta)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, final = _chunks(q, k, v, g, beta, scale, state, output_final_state, bounds, cp_context)
    if not q.numel():
        o, final = inputs.with_zero_gradients((o, final), q, k, v, beta, g, state)
    return o, inputs.transpose_if(v_first, final)


@traceable("int chunk_size=64", dtype_of="v")  # type: ignore[untyped-decorator]
@on_its_device  # type: ignore[untyped-decorator]
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    inplace_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply Kimi Delta Attention (arXiv 2510.26692) token by token.

    For decoding (T = 1 with a state) and short sequences, because the T steps are sequential.
    Results and gradients are those of `chunk_kda`, in v's dtype. The arguments are those of that
    function and of `fused_recurrent_gated_delta_rule`.

    Raises:
        ValueError: as both.
    """
    v_first = inputs.value_first(state_v_first, kwargs)
    inputs.check_options(fused_recurrent_kda, kwargs)
    if inplace_state and v_first:
        raise ValueError("inplace_state needs states [K, V]: omit state_v_first")
    _check(q, k, v, g, beta, scale, initial_state, cu_seqlens, v_first)
    inputs.check_bounds_device(cu_seqlens, q)
    if use_gate_in_kernel:
        g = channel_decays(g, A_log, dt_bias, lower_bound)
    how = inputs.preparation(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    state = inputs.transpose_if(v_first, initial_state)
    q, k, beta = prepare(how, q, k, beta)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, final = run_recurrent(
        q, k, v, beta, state, output_final_state, cu_seqlens, scale, inplace_state, g
    )
    if not q.numel():
        o, final = inputs.with_zero_gradients((o, final), q, k, v, beta, g, state)
    return o.to(v.dtype), inputs.transpose_if(v_first, final)


def channel_decays(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """Return the log decays `[B, T, HV, K]` of a gate's input, in fp32 (fp64 for fp64 g).

    Raises:
        ValueError: A_log is missing, A_log or dt_bias has a wrong size, dtype or device, or
            `lower_bound` is not negative.
    """
    HV, K = g.shape[2:]
    if A_log is None and lower_bound is None:
        raise ValueError(f"use_gate_in_kernel=True needs A_log of {HV} values, or a lower_bound")
    flat = {
        name: x.flatten() if isinstance(x, Tensor) else x
        for name, x in inputs.present(A_log=A_log, dt_bias=dt_bias).items()
    }
    for name, x in flat.items():
        expect(name, x, (HV if name == "A_log" else HV * K,), g.device)
    wide = g if g.dtype == torch.float64 else g.float()
    if dt_bias is not None:
        wide = wide + flat["dt_bias"].to(wide.dtype).view(HV, K)
    rate = torch.ones((), device=g.device)
    if A_log is not None:
        rate = torch.exp(flat["A_log"].to(wide.dtype)).unsqueeze(-1)
    if lower_bound is None:
        return -rate * F.softplus(wide)
    expect_number("lower_bound", lower_bound)
    if not lower_bound < 0:
        raise ValueError(f"lower_bound, the lowest log decay, must be negative; got {lower_bound}")
    return lower_bound * torch.sigmoid(rate * wide)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    v_first: bool,
) -> None:
    inputs.check(q, k, v, scale, initial_state, cu_seqlens, v_first, beta=beta)
    expect("g", g, (*v.shape[:3], q.shape[3]), q.device)


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    state: Tensor | None,
    output_final_state: bool,
    bounds: Tensor | None,
    cp_context: Any,
) -> tuple[Tensor, Tensor | None]:
    results: tuple[Tensor, Tensor | None]
    if cp_context is not None:
        from fla.ops.quasar.parallel.chunks import run_parallel  # imports torch.distributed

        results = run_parallel(cp_context, output_final_state, q, k, v, beta, state, None, scale, g)
        return results
    if has_kernels(q) and (backend := requested_backend()) != "torch":
        if backend == "cuda":
            raise CudaUnavailableError(
                "QUASAR_BACKEND=cuda, but decays per channel also need Triton kernels",
                "set QUASAR_BACKEND=auto",
            )
        heads = Heads(q.shape[-1], v.shape[-1], True)
        cut = None if state is None else heads.cut_state(state)
        o, final = kda_triton(
            q, k, heads.cut(v), heads.scalars(g), heads.scalars(beta), cut, output_final_state,
            bounds, scale,
        )  # fmt: skip
        return heads.joined(o), None if final is None else heads.joined_state(final)
    q, k, *_ = ScanInputs.of(q, k, v, beta).with_equal_heads()
    results = chunk_quasar_torch(q, k, v, beta, state, output_final_state, bounds, scale=scale, g=g)
    return results
