"""The referee's reference layer: random weights, and outputs in fp32 by the definition."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.worker.chain import RUN, drawn
from harness.workload import WORKLOAD
from quasar_kernels.reference import quasar_chunked, quasar_layer

SEGMENT = 1 << 16
"""Tokens, summed over calls, that the referee computes at once; they need about 3 GB."""

BETA = 1, 16
"""Bounds of exp(beta_log) of a new layer. With smaller values heads forget more slowly, and kernels
that skip forgotten tokens would take longer than in the public loop."""


def secret_seed() -> int:
    """Return a secret seed from the system's generator; the subject cannot predict it."""
    return secrets.randbits(62)


def draw_weights(device: torch.device) -> dict[str, Tensor]:
    """Return weights distributed like a new layer's; the subject could supply trivial ones."""
    width, hidden = WORKLOAD.num_heads * WORKLOAD.head_dim, WORKLOAD.hidden_size
    generator = torch.Generator(device).manual_seed(secret_seed())

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, device=device)

    def linear(inputs: int, *shape: int) -> Tensor:
        return uniform(-(inputs**-0.5), inputs**-0.5, *shape)

    weights = {f"{name}_proj.weight": linear(hidden, width, hidden) for name in "qkv"}
    weights |= {f"{name}_conv1d.weight": linear(4, width, 1, 4) for name in "qkv"}
    return weights | {
        "beta_log": uniform(*BETA, WORKLOAD.num_heads).log(),
        "g_proj.0.weight": linear(hidden, WORKLOAD.head_dim, hidden),
        "g_proj.1.weight": linear(WORKLOAD.head_dim, width, WORKLOAD.head_dim),
        "g_proj.1.bias": linear(WORKLOAD.head_dim, width),
        "o_norm.weight": uniform(0.9, 1.1, WORKLOAD.head_dim),
        "o_proj.weight": linear(width, hidden, width),
    }


def output_size(weights: Mapping[str, Tensor], device: torch.device) -> float:
    """Return the root mean square of the layer's outputs."""
    x = drawn((1, 512, WORKLOAD.hidden_size), secret_seed(), device)
    y = next(outputs(weights, x, torch.ones(1, x.shape[-1], device=device)))
    return float(y.square().mean().sqrt())


def outputs(weights: Mapping[str, Tensor], x: Tensor, factors: Tensor) -> Iterator[Tensor]:
    """Yield the layer's outputs for `x * factors`, in segments of whole runs of RUN tokens.

    x is `[1, T, channels]`, the factors `[calls, channels]`.
    """
    taps = weights["q_conv1d.weight"].shape[-1]
    size = max(RUN, SEGMENT // len(factors) // RUN * RUN)
    state: Tensor | None = None
    for start in range(0, x.shape[1], size):
        before = min(start, taps - 1)  # earlier tokens that the convolutions read

        def operate(
            q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dtype: torch.dtype, before: int = before
        ) -> tuple[Tensor, Tensor]:
            nonlocal state
            q, k, v = (part[:, before:] for part in (q, k, v))
            o, state = quasar_chunked(q, k, v, beta, state, dtype=dtype)
            return F.pad(o, (0, 0, 0, 0, before, 0)), state

        with torch.no_grad():
            y = quasar_layer(
                weights,
                x[:, start - before : start + size] * factors[:, None],
                num_heads=WORKLOAD.num_heads,
                head_dim=WORKLOAD.head_dim,
                dtype=torch.float32,
                operator=operate,
            )
        yield y[:, before:]
