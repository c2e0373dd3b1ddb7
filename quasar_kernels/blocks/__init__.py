"""Blocks for people who build models with these kernels.

from quasar_kernels.blocks import RWKV6TimeMixing
"""

from __future__ import annotations

from quasar_kernels.mount import mount

mount()

from quasar_kernels.blocks.backends import Backend  # noqa: E402 it needs what is mounted
from quasar_kernels.blocks.rwkv6 import RWKV6TimeMixing, TimeMixingState  # noqa: E402

__all__ = ["Backend", "RWKV6TimeMixing", "TimeMixingState"]
