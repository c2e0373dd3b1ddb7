"""The layer's peak memory by length, computed from the sizes of its tensors.

The formulas are for QuasarAttention on fp32 input `[1, T, hidden]` under 16-bit autocast. Each sums
the tensors that exist at the same time in the stage of `fla.ops.quasar.layer` with the peak.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Way = Literal["recorded", "no_grad", "training"]
"""`recorded`: a forward pass recorded by autograd while the previous call's output is still
allocated, as validators time it; `no_grad`: the same without gradients; `training`: forward and
backward pass."""

KEPT_MIB = 3072
"""Default of QUASAR_KEEP_MIB, as in `fla.ops.quasar.layer.autograd`."""

FIXED_BYTES = {"recorded": 96 << 20, "no_grad": 96 << 20, "training": 320 << 20}
"""Bytes that hardly depend on the length: weights, states of segments, workspaces of cuBLAS."""


class LayerSize(NamedTuple):
    """The sizes of a layer; the default is the layer that validators time."""

    hidden_size: int = 512
    num_heads: int = 8
    head_dim: int = 64


VALIDATORS = LayerSize()


def is_fused(capability: str | None, size: LayerSize = VALIDATORS) -> bool:
    """Return whether a GPU of this compute capability ("9.0") runs the layer's fused kernels."""
    return capability == "9.0" and size == VALIDATORS


def kept_bytes(size: LayerSize = VALIDATORS) -> int:
    """Return the bytes per token that `saves_results` counts towards QUASAR_KEEP_MIB.

    Calls of fewer than 32,768 tokens keep more, but far less than the default limit.
    """
    D, H, S = size
    return 2 * (D + 4 * H * S + S) + 2 * (3 * H * S + S)


def bytes_per_token(way: Way, kept: bool, fused: bool, size: LayerSize = VALIDATORS) -> int:
    """Return the bytes per token at the peak of a long call.

    Args:
        kept: whether the call stores its intermediate results for the backward pass.
        fused: as `is_fused`.
    """
    D, H, S = size
    x, y = 4 * D, 2 * D
    N = H * S
    qkv, o, narrow = 6 * N, 2 * N, 2 * S
    products = qkv + narrow  # before the convolution
    rows = 2 * D  # x in 16 bits
    if way == "training":
        # the convolution's gradient reads dq, dk, dv and the products, and writes the products'
        # gradients and sums over 256 tokens; the last products need x, y, dy and `rows`
        gradients = qkv + 2 * products + narrow + 15 * N * 4 // 256
        return x + 2 * y + rows + gradients + (qkv + o + narrow if kept else 0)
    if way == "recorded" and kept:
        results = narrow + qkv + o + y + (0 if fused else rows + products)
        return x + 2 * results + (0 if fused else o)  # results of this and the previous call
    operator = narrow + qkv + o
    convolution = 0 if fused else rows + products + narrow + qkv
    return x + y + max(operator, convolution)


def peak_bytes(
    tokens: int,
    way: Way = "recorded",
    size: LayerSize = VALIDATORS,
    *,
    fused: bool = False,
    keep_mib: int = KEPT_MIB,
) -> int:
    """Return an estimate of the peak of a call's allocated memory, with input and parameters.

    Up to 65,536 tokens the estimate is too high, because CUDA graphs reuse memory. For longer calls
    its error is a few percent. It does not include the driver's context of half a GiB.
    """
    kept = way != "no_grad" and tokens * kept_bytes(size) <= keep_mib << 20
    return FIXED_BYTES[way] + tokens * bytes_per_token(way, kept, fused, size)


def largest_length(
    memory_bytes: float,
    way: Way = "training",
    size: LayerSize = VALIDATORS,
    *,
    fused: bool = False,
    keep_mib: int = KEPT_MIB,
) -> int:
    """Return the largest length with a peak of at most `memory_bytes`; 0 if no length fits.

    Args:
        memory_bytes: free memory, for example `torch.cuda.mem_get_info()[0]`.
        way, size, fused, keep_mib: as for `peak_bytes`.
    """

    def most(kept: bool) -> int:
        rest = max(0, int(memory_bytes) - FIXED_BYTES[way])
        return rest // bytes_per_token(way, kept, fused, size)

    limit = (keep_mib << 20) // kept_bytes(size)  # the longest call that stores its results
    if way == "no_grad" or most(kept=False) > limit:
        return most(kept=False)
    return min(most(kept=True), limit)
