"""The delta rule token by token, for decoding, with fla's signatures."""

from __future__ import annotations

from typing import Any

import torch
from fla.ops.quasar.device import on_its_device
from fla.ops.quasar.fused_recurrent import run_recurrent
from fla.ops.quasar.preparation import Preparation, prepare
from fla.ops.quasar.traceable import traceable
from torch import Tensor

from quasar_kernels.delta_rule import inputs


@traceable("int chunk_size=64")  # type: ignore[untyped-decorator]
@on_its_device  # type: ignore[untyped-decorator]
def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    inplace_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply the delta rule (arXiv 2406.06484) token by token.

    For decoding (T = 1 with a state) and short sequences, because the T steps are sequential.
    Arguments and results are those of `chunk_delta_rule`, except:

    Args:
        beta: `[B, T, HV]`; None is 1; step sizes per channel of the values are not supported.
        cu_seqlens: on q's device; on a GPU its values are not checked, because the host would wait.
        inplace_state: return the final state. It overwrites `initial_state` if there is one and no
            gradient is needed; the state must be contiguous fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: as `chunk_delta_rule`; or `inplace_state` with a state of another dtype or
            layout.
    """
    inputs.check_options(fused_recurrent_delta_rule, kwargs)
    _check(q, k, v, scale, initial_state, cu_seqlens, beta=beta)
    if beta is None:
        beta = _ones(v)
    how = inputs.preparation(use_qk_l2norm_in_kernel)
    options = scale, initial_state, output_final_state, how
    return _run(q, k, v, None, beta, *options, cu_seqlens, inplace_state)


@traceable("int chunk_size=64", dtype_of="v")  # type: ignore[untyped-decorator]
@on_its_device  # type: ignore[untyped-decorator]
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    inplace_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply the gated delta rule (arXiv 2412.06464) token by token.

    Results and gradients are those of `chunk_gated_delta_rule`, in v's dtype. The arguments are
    those of that function and of `fused_recurrent_delta_rule`, except:

    Args:
        g: `[B, T, HV]`, or None for no decay.
        gk, gv: decays per channel; must be None.
        beta: `[B, T, HV]`; None is 1.

    Raises:
        ValueError: as for both; or gk or gv is not None; or `inplace_state` with `state_v_first`.
    """
    v_first = inputs.value_first(state_v_first, kwargs)
    inputs.check_options(fused_recurrent_gated_delta_rule, kwargs)
    if gk is not None or gv is not None:
        raise ValueError(
            "gk and gv, decays per channel, are not supported: pass gk as g to "
            "fused_recurrent_kda, or call fla's function of this name"
        )
    if inplace_state and v_first:
        raise ValueError("inplace_state needs states [K, V]: omit state_v_first")
    _check(q, k, v, scale, initial_state, cu_seqlens, v_first, g=g, beta=beta)
    if use_gate_in_kernel:
        if g is None:
            raise ValueError("use_gate_in_kernel=True needs g, the gate's input")
        g = inputs.log_decays(g, A_log, dt_bias)
    if beta is None:
        beta = _ones(v)
    sigmoid = use_beta_sigmoid_in_kernel, allow_neg_eigval
    how = inputs.preparation(use_qk_l2norm_in_kernel, *sigmoid)
    state = inputs.transpose_if(v_first, initial_state)
    options = scale, state, output_final_state, how
    o, final = _run(q, k, v, g, beta, *options, cu_seqlens, inplace_state)
    return o.to(v.dtype), inputs.transpose_if(v_first, final)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    v_first: bool = False,
    **scalars: Tensor | None,
) -> None:
    inputs.check(q, k, v, scale, initial_state, cu_seqlens, v_first, **inputs.present(**scalars))
    inputs.check_bounds_device(cu_seqlens, q)


def _ones(v: Tensor) -> Tensor:
    return torch.ones(v.shape[:3], dtype=torch.float32, device=v.device)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    how: Preparation,
    cu_seqlens: Tensor | None,
    inplace_state: bool,
) -> tuple[Tensor, Tensor | None]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, beta = prepare(how, q, k, beta)
    results: tuple[Tensor, Tensor | None] = run_recurrent(
        q, k, v, beta, initial_state, output_final_state, cu_seqlens, scale, inplace_state, g
    )
    if q.numel():
        return results
    return inputs.with_zero_gradients(results, q, k, v, beta, g, initial_state)
