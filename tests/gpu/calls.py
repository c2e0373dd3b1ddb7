"""What the GPU tests share: marks for kinds of GPUs, inputs on one, and memory full of NaN."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.quasar_kernels import inputs

H, S = 8, 64
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _on_gpu_if(fits, reason):
    # where there is no GPU, conftest.py skips what is marked `gpu`
    return [pytest.mark.gpu, pytest.mark.skipif(CAPABILITY is not None and not fits, reason=reason)]


ON_CUDA_KERNELS = _on_gpu_if(CAPABILITY and CAPABILITY >= (8, 0), "needs compute capability 8.0")
"""Marks of tests of the kernels that are compiled for every GPU from 8.0 on."""
ON_HOPPER = _on_gpu_if(CAPABILITY == (9, 0), "needs compute capability 9.0")
"""Marks of tests of the kernels that are for Hopper alone."""

layer_like = partial(inputs.layer_like, H=H, S=S, dtype=torch.bfloat16, device="cuda")
"""The same as of the CPU's tests, on the GPU and as large as a validator's."""
packed = partial(inputs.packed, device="cuda")

CHANNELS = H * S
"""Of all heads together: 8 heads of 64 or 4 of 128."""
both_widths = pytest.mark.parametrize("width", [64, 128])
"""The widths of heads that the CUDA kernels take."""
PORTABLE = ("-DQUASAR_NO_WGMMA",)
"""Compiler options that take wgmma from a Hopper GPU: what runs elsewhere."""


def inputs_of(T, width, **options):
    """Layer-like q, k, v and beta for heads of a width; the options are layer_like's."""
    return layer_like(T, **{"H": CHANNELS // width, "S": width, **options})


def poison():
    """Fill freed blocks of the allocator with NaN, so that an unwritten output shows."""
    junk = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 12, 1 << 18, 1 << 26)]
    del junk
