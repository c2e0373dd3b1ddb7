"""The arguments of a delta-rule call: their checks, and their conversion for the kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fla.ops.quasar.arguments import (
    check_bounds,
    check_state,
    expect,
    expect_heads,
    expect_number,
    refuse_unknown,
)
from fla.ops.quasar.chunk_torch import sequence_lengths
from fla.ops.quasar.preparation import Preparation
from fla.ops.quasar.segments import host_bounds
from torch import Tensor

CHUNK_SIZES = (16, 32, 64)
"""Values of fla's `chunk_size`; these kernels ignore it and choose their own."""

Results = tuple[Tensor, Tensor | None]
"""The output, and the final state if it is requested."""


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: object,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    v_first: bool = False,
    **scalars: Tensor,
) -> None:
    """Check a call's arguments without reading tensors on a GPU.

    Args:
        v_first: whether states are `[N, HV, V, K]`.
        scalars: beta and g, `[B, T, HV]`, by name.

    Raises:
        ValueError: an argument is not a tensor of a floating dtype, has a wrong shape or device;
            there is no head or channel; or `scale` is not a number.
    """
    expect("q", q, ("B", "T", "H", "K"))
    device, (B, T, H, K) = q.device, q.shape
    expect("k, like q,", k, q.shape, device)
    expect("v", v, (B, T, "HV", "V"), device)
    HV, V = v.shape[2:]
    expect_heads(q, v)
    if HV % H:
        raise ValueError(f"v's heads must be a multiple of the {H} heads of q and k; got {HV}")
    for name, x in scalars.items():
        expect(name, x, (B, T, HV), device)
    check_state(initial_state, cu_seqlens, B, (HV, V, K) if v_first else (HV, K, V), device)
    if scale is not None:
        expect_number("scale", scale, ", or None for 1 / sqrt(K)")


def present(**scalars: Tensor | None) -> dict[str, Tensor]:
    """Return the scalars that are not None, for `check`."""
    return {name: x for name, x in scalars.items() if x is not None}


def bounds_on_host(
    cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, tokens: int
) -> Tensor | None:
    """Return the bounds on the host, where launches need them; None without bounds.

    Without `cu_seqlens_cpu`, `segments.host_bounds` copies bounds on a GPU to the host.
    `cu_seqlens_cpu` is compared with `cu_seqlens`, unless that is on a GPU.

    Raises:
        ValueError: the bounds do not rise from 0 to `tokens`, or the copy differs.
    """
    check_bounds(cu_seqlens_cpu, 1, "cu_seqlens_cpu")
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu copies cu_seqlens, which is None: pass both")
        return None
    if cu_seqlens_cpu is None:
        bounds = torch.tensor(host_bounds(cu_seqlens), dtype=cu_seqlens.dtype)
    else:
        bounds = cu_seqlens_cpu.cpu()
        known = bounds if cu_seqlens.is_cuda else cu_seqlens
        if bounds.shape != cu_seqlens.shape or not bool((bounds == known).all()):
            raise ValueError(
                f"cu_seqlens_cpu must equal cu_seqlens, of shape {list(cu_seqlens.shape)}; got "
                f"{bounds.tolist()}"
            )
    sequence_lengths(bounds, 1, tokens)
    return bounds


def check_bounds_device(cu_seqlens: Tensor | None, q: Tensor) -> None:
    """Check that bounds are on q's device, because the recurrent kernel reads them in place.

    Raises:
        ValueError: they are on another device.
    """
    if cu_seqlens is not None and cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on q's device, {q.device}; got {cu_seqlens.device}")


def check_options(function: Callable[..., Any], options: dict[str, Any], *known: str) -> None:
    """Check that all options of a function's call are `known` or `chunk_size`.

    Raises:
        ValueError: an option is unknown, or `chunk_size` is none of `CHUNK_SIZES`.
    """
    refuse_unknown(function, options, ("chunk_size", *known))
    if options.get("chunk_size", 64) not in CHUNK_SIZES:
        sizes = ", ".join(map(str, CHUNK_SIZES))
        raise ValueError(f"chunk_size is {options['chunk_size']}; it must be one of {sizes}")


def preparation(unit: bool, sigmoid: bool = False, allow_neg_eigval: bool = False) -> Preparation:
    """Return what is computed from q, k and beta before the operator.

    Raises:
        ValueError: `allow_neg_eigval` without `sigmoid`.
    """
    if not sigmoid:
        if allow_neg_eigval:
            raise ValueError(
                "allow_neg_eigval=True doubles the sigmoid of beta: set "
                "use_beta_sigmoid_in_kernel=True, or pass twice the step sizes"
            )
        return Preparation(unit)
    return Preparation(unit, 2.0 if allow_neg_eigval else 1.0)


def log_decays(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """Return -exp(A_log) softplus(g + dt_bias), `[B, T, HV]`, in fp32 (fp64 for fp64 g).

    Raises:
        ValueError: A_log is missing, or A_log or dt_bias has a wrong shape, dtype or device.
    """
    if A_log is None:
        raise ValueError("use_gate_in_kernel=True needs A_log, of shape [HV]")
    for name, x in present(A_log=A_log, dt_bias=dt_bias).items():
        expect(name, x, g.shape[2:], g.device)
    wide = g if g.dtype == torch.float64 else g.float()
    if dt_bias is not None:
        wide = wide + dt_bias.to(wide.dtype)
    return -torch.exp(A_log.to(wide.dtype)) * F.softplus(wide)


def value_first(state_v_first: bool, options: dict[str, Any]) -> bool:
    """Return whether states are `[V, K]`; remove fla's older name of this option from `options`.

    Raises:
        ValueError: both names are given.
    """
    if "transpose_state_layout" not in options:
        return state_v_first
    if state_v_first:
        raise ValueError(
            "transpose_state_layout is the older name of state_v_first: pass only one of them"
        )
    warnings.warn(
        "transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=3
    )
    return bool(options.pop("transpose_state_layout"))


def transpose_if(condition: bool, state: Tensor | None) -> Tensor | None:
    """Return states with their last two dimensions exchanged if the condition holds."""
    return state.transpose(-1, -2).contiguous() if condition and state is not None else state


def with_zero_gradients(results: Results, *inputs: Tensor | None) -> Results:
    """Return the results of a call without tokens such that all inputs get gradients of zero."""
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    if not leaves or not torch.is_grad_enabled():
        return results
    # sums over no elements: an initial state has elements even if there are no tokens
    zero = torch.stack([x.flatten()[:0].sum().double() for x in leaves]).sum()
    o, final = results
    return o + zero, None if final is None else final + zero
