"""A mark for tests that need NVRTC, the compiler of the CUDA kernels."""

from __future__ import annotations

import pytest
from fla.ops.quasar.cuda import nvrtc


def _is_missing() -> bool:
    try:
        nvrtc.load_library()
    except nvrtc.CudaUnavailableError:
        return True
    return False


needs_nvrtc = pytest.mark.skipif(_is_missing(), reason="NVRTC is not installed")
