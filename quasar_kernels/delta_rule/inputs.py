"""What a call of the delta rule is given: checks, and what is computed of it before the kernels."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from fla.ops.quasar.chunk_torch import l2norm
from torch import Tensor

CHUNK_SIZES = (16, 32, 64)
"""What the host's `chunk_size` may be; here the kernels choose, and it changes nothing."""


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Check the shapes of a call.

    Raises:
        ValueError: shapes do not fit one another, or tensors are on several devices.
    """
    if q.ndim != 4 or k.shape != q.shape:
        raise ValueError(
            f"q and k must have one shape [B, T, H, K]; got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    B, T, H, K = q.shape
    if v.ndim != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % H:
        raise ValueError(
            f"v must have shape [{B}, {T}, HV, V], HV a multiple of the {H} heads of q and k; got "
            f"{tuple(v.shape)}"
        )
    HV, V = v.shape[2:]
    for name, x in (("beta", beta), ("g", g)):
        if x is not None and x.shape != (B, T, HV):
            raise ValueError(
                f"{name} must have shape [{B}, {T}, {HV}], one value a token and head of v; got "
                f"{tuple(x.shape)}"
            )
    if any(x is not None and x.device != q.device for x in (k, v, beta, g, initial_state)):
        raise ValueError(f"all inputs must be on q's device, {q.device}")
    if cu_seqlens is not None and B != 1:
        raise ValueError(
            f"cu_seqlens packs sequences into one row, so B must be 1; got B = {B}: flatten them"
        )
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is not None and initial_state.shape != (N, HV, K, V):
        raise ValueError(
            f"initial_state must have shape {(N, HV, K, V)}, one state a sequence; got "
            f"{tuple(initial_state.shape)}"
        )


def without(options: dict[str, Any], *known: str) -> None:
    """Refuse options that mean something that is not done; `known` ones, and `chunk_size`, go.

    Raises:
        ValueError: an option is unknown, or `chunk_size` is none of `CHUNK_SIZES`.
    """
    if options.get("chunk_size", 64) not in CHUNK_SIZES:
        sizes = ", ".join(map(str, CHUNK_SIZES))
        raise ValueError(f"chunk_size is {options['chunk_size']}; it must be one of {sizes}")
    if "head_first" in options:
        raise ValueError("head_first is gone: pass inputs as [B, T, H, ...]")
    unknown = set(options) - {"chunk_size", *known}
    if unknown:
        raise ValueError(f"unknown options {', '.join(sorted(unknown))}: leave them out")


def normed(x: Tensor) -> Tensor:
    """Return x with rows of unit length, rounded to x's dtype."""
    if x.is_cuda and x.dtype != torch.float64:
        from fla.modules.norm.l2norm import l2norm as host_l2norm  # one kernel each way

        of_host: Tensor = host_l2norm(x)
        return of_host
    unit: Tensor = l2norm(x)
    return unit


def step_sizes(beta: Tensor, sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    """Return the step sizes: beta, or its sigmoid, or twice that.

    Raises:
        ValueError: `allow_neg_eigval` without `sigmoid`.
    """
    if not sigmoid:
        if allow_neg_eigval:
            raise ValueError(
                "allow_neg_eigval=True doubles the sigmoid of beta: set "
                "use_beta_sigmoid_in_kernel=True, or pass twice the step sizes"
            )
        return beta
    wide = beta if beta.dtype == torch.float64 else beta.float()
    return torch.sigmoid(wide) * (2.0 if allow_neg_eigval else 1.0)


def log_decays(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """Return -exp(A_log) softplus(g + dt_bias), of `[B, T, HV]` and `[HV]` each, in fp32.

    Raises:
        ValueError: there is no A_log.
    """
    if A_log is None:
        raise ValueError("use_gate_in_kernel=True needs A_log, of shape [HV]")
    wide = g if g.dtype == torch.float64 else g.float()
    if dt_bias is not None:
        wide = wide + dt_bias.to(wide.dtype)
    return -torch.exp(A_log.to(wide.dtype)) * F.softplus(wide)


def value_first(state_v_first: bool, options: dict[str, Any]) -> bool:
    """Return whether states are `[V, K]`; takes the host's older name for it out of `options`.

    Raises:
        ValueError: both names are given.
    """
    if "transpose_state_layout" not in options:
        return state_v_first
    if state_v_first:
        raise ValueError(
            "state_v_first and transpose_state_layout, its older name, are given: leave one out"
        )
    warnings.warn(
        "transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=3
    )
    return bool(options.pop("transpose_state_layout"))


def turned(state: Tensor | None, turn: bool) -> Tensor | None:
    """Return states `[N, H, K, V]` of `[N, H, V, K]` ones, or the reverse, if `turn`."""
    return state.transpose(-1, -2).contiguous() if turn and state is not None else state
