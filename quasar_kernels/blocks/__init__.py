"""Blocks for people who build models with these kernels.

from quasar_kernels.blocks import HybridBlock

block = HybridBlock(width=512, heads=8, mixers=("rwkv6", "mamba2", "quasar"))
"""

from __future__ import annotations

from quasar_kernels.mount import mount

mount()

from quasar_kernels.blocks.backends import Backend  # noqa: E402 it needs what is mounted
from quasar_kernels.blocks.hybrid import MIXERS, BlockState, HybridBlock  # noqa: E402
from quasar_kernels.blocks.mamba2 import Mamba2, Mamba2State  # noqa: E402
from quasar_kernels.blocks.quasar import QuasarMixer  # noqa: E402
from quasar_kernels.blocks.rwkv6 import RWKV6TimeMixing, TimeMixingState  # noqa: E402

__all__ = [
    "MIXERS",
    "Backend",
    "BlockState",
    "HybridBlock",
    "Mamba2",
    "Mamba2State",
    "QuasarMixer",
    "RWKV6TimeMixing",
    "TimeMixingState",
]
