"""Shared by the GPU tests: marks for kinds of GPUs, inputs on a GPU, and poisoned memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.quasar_kernels import inputs

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
