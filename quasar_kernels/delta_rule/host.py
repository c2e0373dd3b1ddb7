"""fla's layers on these kernels, within a block of code or permanently.

    from quasar_kernels.delta_rule.host import switched

    with switched():
        y, *_ = model(x)  # DeltaNet and Gated DeltaNet layers of fla

`register` adds these kernels to fla's dispatch of `chunk_gated_delta_rule`. fla then asks a
verifier at each call, and computes the calls that these kernels do not support. fla has no dispatch
for the other three functions, so `switched` replaces all four in every loaded module that has
imported one.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fla.ops.delta_rule as fla_delta_rule
import fla.ops.gated_delta_rule as fla_gated_delta_rule
import torch
from fla.backends import BaseBackend
from fla.backends import register as register_in_fla
from fla.ops.quasar.backend import MAX_HEAD_DIM
from fla.ops.quasar.fused_recurrent import MAX_HEAD_DIM as MAX_RECURRENT_HEAD_DIM

from quasar_kernels import delta_rule

_originals: dict[str, Callable[..., Any]] = {
    name: getattr(fla_gated_delta_rule if "gated" in name else fla_delta_rule, name)
    for name in delta_rule.__all__
    if name.endswith("delta_rule")
}


def reason_against(name: str, *args: Any, **kwargs: Any) -> str | None:
    """Return why fla computes a call of one of the four functions, or None if these kernels do.

    fla computes calls with decays or step sizes per channel, or with a cp_context that has not
    contiguous slices. On a GPU, it also computes head widths that these kernels do not support.
    """
    arguments = dict(zip(_parameters(name), args, strict=False)) | kwargs
    q, v, beta = (arguments.get(x) for x in ("q", "v", "beta"))
    if not (isinstance(q, torch.Tensor) and isinstance(v, torch.Tensor)):
        return None  # these kernels raise an error that names the argument
    for option in ("gk", "gv"):
        if arguments.get(option) is not None:
            return f"{option} is not None"
    context = arguments.get("cp_context")
    if context is not None and context.layout != "contiguous":
        return f"cp_context has the layout {context.layout}"
    if isinstance(beta, torch.Tensor) and beta.ndim != 3:
        return "beta has more than one value per token and head"
    recurrent = name.startswith("fused")
    widest = MAX_RECURRENT_HEAD_DIM if recurrent else MAX_HEAD_DIM
    if q.is_cuda and q.shape[-1] > widest:
        return f"heads have {q.shape[-1]} channels; these kernels support up to {widest}"
    if q.is_cuda and recurrent and v.shape[-1] != q.shape[-1]:
        return "values are not as wide as keys"
    return None


@functools.cache
def _parameters(name: str) -> tuple[str, ...]:
    code = inspect.unwrap(getattr(delta_rule, name)).__code__
    return tuple(code.co_varnames[: code.co_argcount])


class QuasarBackend(BaseBackend):
    """These kernels as a backend of fla's dispatch; FLA_QUASAR_DELTA_RULE=0 disables them."""

    backend_type = "quasar_kernels"
    env_var = "FLA_QUASAR_DELTA_RULE"
    priority = 1

    def chunk_gated_delta_rule_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """Return whether these kernels support the call, and the reason if not."""
        reason = reason_against("chunk_gated_delta_rule", *args, **kwargs)
        return reason is None, reason

    def chunk_gated_delta_rule(
        self, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the call by these kernels."""
        results: tuple[torch.Tensor, torch.Tensor | None]
        results = delta_rule.chunk_gated_delta_rule(*args, **kwargs)
        return results


def register() -> None:
    """Register these kernels in fla's dispatch of `chunk_gated_delta_rule`.

    All callers then use them, including modules that imported the function earlier.
    FLA_DISABLE_BACKEND_DISPATCH=1 disables this.
    """
    register_in_fla("gated_delta_rule")(QuasarBackend)


@contextmanager
def switched() -> Iterator[None]:
    """Replace fla's four functions by these kernels in all loaded modules, until the block ends.

    fla still computes the calls that these kernels do not support (`reason_against`). Import fla's
    layers before this block, because modules that are imported later are not changed. Other threads
    are affected, too.
    """
    ours = {id(original): _replacement(name) for name, original in _originals.items()}
    changed = []
    for module in list(sys.modules.values()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in ours and module is not sys.modules[__name__]:
                setattr(module, key, ours[id(value)])
                changed.append((module, key, value))
    try:
        yield
    finally:
        for module, key, value in changed:
            setattr(module, key, value)


def _replacement(name: str) -> Callable[..., Any]:
    original = _originals[name]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        function = getattr(delta_rule, name)
        return (original if reason_against(name, *args, **kwargs) else function)(*args, **kwargs)

    return call
