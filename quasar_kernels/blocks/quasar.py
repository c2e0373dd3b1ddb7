"""The overlay's QuasarAttention with the interface of this package's other mixers."""

from __future__ import annotations

from typing import Any

import torch
from fla.layers.quasar import QuasarAttention, QuasarCache
from fla.ops.quasar.arguments import check_bounds, expect, expect_sizes
from fla.ops.quasar.backend import choose_backend
from torch import Tensor, nn

from quasar_kernels.blocks.backends import Backend


class QuasarMixer(nn.Module):
    """QuasarAttention (arXiv 2512.12602) over `width` channels.

    Args:
        width: channels of the input and the output.
        heads: number of heads, of width / heads channels each.

    Raises:
        ValueError: a size is below 1, or width is not a multiple of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        expect_sizes(width=width, heads=heads)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads; got {width} and {heads}")
        self.layer = QuasarAttention(width, width // heads, heads, layer_idx=0)

    def forward(
        self,
        x: Tensor,
        state: QuasarCache | None = None,
        cu_seqlens: Tensor | None = None,
        keep: bool = False,
        cp_context: Any = None,
    ) -> tuple[Tensor, QuasarCache | None]:
        """Return y `[B, T, width]` and the state or None, as `HybridBlock.forward` does."""
        expect("x", x, ("B", "T", self.layer.hidden_size))
        check_bounds(cu_seqlens, x.shape[0])
        if state is not None and len(state):
            N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
            kept = state[0]["recurrent_state"]
            expect("the state's `recurrent_state`", kept, (N, *kept.shape[1:]), x.device)
        y, _, state = self.layer(
            x, past_key_values=state, use_cache=keep, cu_seqlens=cu_seqlens, cp_context=cp_context
        )
        return y, state if keep else None

    def backend(self, dtype: torch.dtype | None = None) -> Backend:
        """Return the operator's backend for autocast's `dtype`; None is the parameters' dtype."""
        weight = self.layer.beta_log
        sizes = (1, 1, self.layer.num_heads, self.layer.head_dim)
        x = torch.zeros(sizes, device=weight.device, dtype=dtype or weight.dtype)
        chosen = choose_backend(x, x, x)
        return Backend(chosen.backend, chosen.reason, chosen.remedy)
