"""Shared by the GPU tests: marks for kinds of GPUs, inputs and gradients, and poisoned memory."""

from functools import partial

import pytest
import torch

from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, quasar_recurrence
from tests.quasar_kernels import inputs

mount()

from fla.ops.quasar import chunk_quasar  # noqa: E402

H, S = 8, 64
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _on_gpu_if(fits, reason):
    # without a GPU, tests/conftest.py skips tests with the mark `gpu`
    return [pytest.mark.gpu, pytest.mark.skipif(CAPABILITY is not None and not fits, reason=reason)]


ON_CUDA_KERNELS = _on_gpu_if(CAPABILITY and CAPABILITY >= (8, 0), "needs compute capability 8.0")
"""Marks of tests of kernels for compute capability 8.0 and later."""
ON_HOPPER = _on_gpu_if(CAPABILITY == (9, 0), "needs compute capability 9.0")
"""Marks of tests of kernels for Hopper only."""

layer_like = partial(inputs.layer_like, H=H, S=S, dtype=torch.bfloat16, device="cuda")
"""The CPU tests' inputs, on the GPU and with a validator's number and width of heads."""
packed = partial(inputs.packed, device="cuda")

CHANNELS = H * S
"""Channels of all heads: 8 heads of 64 or 4 of 128."""
both_widths = pytest.mark.parametrize("width", [64, 128])
"""The widths of heads that the CUDA kernels support."""
PORTABLE = ("-DQUASAR_NO_WGMMA",)
"""Compiler options that select the code for other GPUs than Hopper, without wgmma."""


def inputs_of(T, width, **options):
    """Return layer-like q, k, v and beta for heads of a width; options as for layer_like."""
    return layer_like(T, **{"H": CHANNELS // width, "S": width, **options})


def poison():
    """Fill freed blocks of the allocator with NaN, so that tests notice unwritten outputs."""
    junk = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 12, 1 << 18, 1 << 26)]
    del junk


def gradients(inputs, d_o, initial=None, d_final=None, cu=None, scale=1.0, *, exact=False):
    """Return the gradients of q, k, v, beta and the initial state, if any.

    Args:
        exact: whether float64 autograd computes them.
    """
    tensors = [x.detach() for x in (*inputs, initial) if x is not None]
    leaves = [(x.double() if exact else x).requires_grad_() for x in tensors]
    state = leaves[4] if initial is not None else None
    if exact:
        oracle = quasar_recurrence if d_o.shape[1] <= 512 else quasar_chunked
        o, final = oracle(*leaves[:4], state, cu)
        results = [scale * o, final]
    else:
        results = chunk_quasar(*leaves[:4], state, d_final is not None, cu, scale=scale)
    pairs = [
        (x, d.to(x.dtype)) for x, d in zip(results, (d_o, d_final), strict=True) if d is not None
    ]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return [x.grad for x in leaves]
