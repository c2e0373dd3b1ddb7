"""The delta rule, with a decay or without, on this project's kernels.

The four functions have the signatures and defaults of flash-linear-attention's of the same names
(fla-core 0.6), so that changing an import is enough:

    from quasar_kernels.delta_rule import chunk_gated_delta_rule

`host.switched()` and `host.register()` switch that library's own layers over.
"""

from __future__ import annotations

from quasar_kernels.mount import mount

mount()

from quasar_kernels.delta_rule.chunk import (  # noqa: E402 the kernels are found once they are mounted
    chunk_delta_rule,
    chunk_gated_delta_rule,
)
from quasar_kernels.delta_rule.recurrent import (  # noqa: E402
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
)

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
]
