"""The calls that are compared: the four functions and their inputs, by rule and implementation.

`cuda` and `triton` are quasar_kernels.delta_rule with QUASAR_BACKEND of that name; `host` is the
host library's function of the same name, given the same arguments; libraries.py has the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.delta_rule.libraries import LIBRARIES
from benchmarks.delta_rule.results import OURS, Rule
from benchmarks.operator.training_results import Shape
from quasar_kernels.delta_reference import delta_chunked

NAMES = (*OURS, "host", *LIBRARIES)
TENSORS = ("q", "k", "v", "beta", "g")


class Inputs(NamedTuple):
    """A call's tensors."""

    q: Tensor  # [B, T, H, S] bf16
    k: Tensor  # the same, of unit length
    v: Tensor  # the same
    beta: Tensor  # [B, T, H] fp32
    g: Tensor | None  # log decays, the same; None for the delta rule


def draw(rule: Rule, shape: Shape, device: str = "cuda") -> Inputs:
    """Draw noise as a Gated DeltaNet layer with default weights makes it.

    Its decays are -A dt with A uniform to 16 and dt spread evenly in its logarithm over .001 to .1
    (arXiv 2412.06464, as Mamba-2 starts).
    """
    batch, tokens, heads, width = shape

    def noise() -> Tensor:
        return F.silu(torch.randn(batch, tokens, heads, width, device=device))

    q, k, v = F.normalize(noise(), dim=-1), F.normalize(noise(), dim=-1), noise()
    beta, gate = (torch.randn(batch, tokens, heads, device=device) for _ in range(2))
    A = torch.empty(heads, device=device).uniform_(0, 16)
    dt = 10 ** torch.empty(heads, device=device).uniform_(-3, -1)
    g = -A * F.softplus(gate + dt.expm1().log()) if rule == "gated delta rule" else None
    return Inputs(q.bfloat16(), k.bfloat16(), v.bfloat16(), beta.sigmoid(), g)


@contextmanager
def selected(name: str, function: str, rule: Rule) -> Iterator[Any]:
    """Give a function by implementation, with the kernels chosen as long as the context lasts.

    Args:
        name: one of NAMES.
        function: `chunk` or `fused_recurrent`, which the other libraries are not asked for.
        rule: which of the two.

    Raises:
        ImportError: the library is not installed, or another error of its import.
    """
    full_name = f"{function}_{rule.replace(' ', '_')}"
    if name == "host":
        import fla.ops.delta_rule
        import fla.ops.gated_delta_rule

        module = fla.ops.delta_rule if rule == "delta rule" else fla.ops.gated_delta_rule
        # where FlashQLA is installed the host hands it heads of 128, and would be timed as that
        with patch.dict(os.environ, {"FLA_FLASH_QLA": "0"}):
            yield getattr(module, full_name)
        return
    if name in LIBRARIES:
        yield LIBRARIES[name].make()
        return
    from quasar_kernels import delta_rule

    with patch.dict(os.environ, {"QUASAR_BACKEND": name}):
        yield getattr(delta_rule, full_name)


def forward(function: Any, x: Inputs) -> Tensor:
    """Compute the outputs `[B, T, H, S]` of whole sequences."""
    o: Tensor
    gate = {} if x.g is None else {"g": x.g}
    o, _ = function(x.q, x.k, x.v, beta=x.beta, **gate)
    return o


def gradients(function: Any, x: Inputs, do: Tensor) -> tuple[Tensor, ...]:
    """Run forward and backward; return the gradients of q, k, v, beta and, where it is, g."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in x]
    with torch.enable_grad():
        o = forward(function, Inputs(*leaves))  # type: ignore[arg-type]
        return torch.autograd.grad(o, [t for t in leaves if t is not None], do.to(o.dtype))


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute the same in float64, with the functions' scale."""
    return delta_chunked(
        q, k, v, options["beta"], options.get("g"), scale=q.shape[-1] ** -0.5, chunk=128
    )


def step(name: str, function: Any, x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Take states `[B, H, S, S]` one token further: ours in place, the host's into new storage."""
    o: Tensor
    final: Tensor
    gate = {} if x.g is None else {"g": x.g}
    keep = {"output_final_state": True} if name == "host" else {"inplace_state": True}
    o, final = function(x.q, x.k, x.v, beta=x.beta, initial_state=state, **gate, **keep)
    return o, final
