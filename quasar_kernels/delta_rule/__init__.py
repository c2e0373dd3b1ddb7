"""The delta rule, without decay or with one per head or channel, on this project's kernels.

The functions have the signatures and defaults of fla's functions of the same names (fla-core 0.6),
so only the import changes:

    from quasar_kernels.delta_rule import chunk_gated_delta_rule

`host.switched()` and `host.register()` make fla's layers use them. A name is imported at its first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quasar_kernels.lazy import lazy_names
from quasar_kernels.mount import mount

mount()

if TYPE_CHECKING:
    from quasar_kernels.delta_rule.chunk import chunk_delta_rule, chunk_gated_delta_rule
    from quasar_kernels.delta_rule.kda import chunk_kda, fused_recurrent_kda
    from quasar_kernels.delta_rule.recurrent import (
        fused_recurrent_delta_rule,
        fused_recurrent_gated_delta_rule,
    )

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "chunk_delta_rule": "chunk",
        "chunk_gated_delta_rule": "chunk",
        "chunk_kda": "kda",
        "fused_recurrent_delta_rule": "recurrent",
        "fused_recurrent_gated_delta_rule": "recurrent",
        "fused_recurrent_kda": "kda",
    },
)
