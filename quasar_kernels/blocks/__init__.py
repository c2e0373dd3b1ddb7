"""Building blocks of models on these kernels.

    from quasar_kernels.blocks import HybridBlock

    block = HybridBlock(width=512, heads=8, mixers=("rwkv6", "mamba2", "quasar"))

A name is imported at its first use, because importing torch and fla takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quasar_kernels.lazy import lazy_names
from quasar_kernels.mount import mount

mount()

MIXERS = ("rwkv6", "mamba2", "quasar")
"""The branches that a `HybridBlock` may have."""

if TYPE_CHECKING:
    from quasar_kernels.blocks.backends import Backend
    from quasar_kernels.blocks.hybrid import BlockState, HybridBlock
    from quasar_kernels.blocks.mamba2 import Mamba2, Mamba2State
    from quasar_kernels.blocks.quasar import QuasarMixer
    from quasar_kernels.blocks.rwkv6 import RWKV6TimeMixing, TimeMixingState

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Backend": "backends",
        "BlockState": "hybrid",
        "HybridBlock": "hybrid",
        "Mamba2": "mamba2",
        "Mamba2State": "mamba2",
        "QuasarMixer": "quasar",
        "RWKV6TimeMixing": "rwkv6",
        "TimeMixingState": "rwkv6",
        "ssd": "",
        "wkv6": "",
    },
)
