"""Context parallelism of mixers with states that decay per channel.

The state after a rank's slice is linear in the state S that enters it: D S + R, where D is the
decay over the slice. Each rank starts from a zero state, gathers D and R of all ranks, and adds the
contribution of the entering state to its outputs. For QuasarAttention, with matrices as maps, the
overlay does this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fla.ops.quasar.layer.rank_slice import HaloFunction, RankSlice
from fla.ops.quasar.parallel.context import place_of
from fla.ops.quasar.parallel.exchange import gather
from torch import Tensor


class MixerSlice:
    """One rank's slice of packed sequences.

    Args:
        context: from `build_cp_context` of the overlay or of fla.
        tokens: number of tokens of the slice.
    """

    def __init__(self, context: Any, tokens: int) -> None:
        self._context, self._tokens = context, tokens
        self._place = place_of(context, tokens)
        self.cu_seqlens: Tensor = context.cu_seqlens_cpu
        """Bounds of the slice's sequences, on the host."""

    def before(self, x: Tensor, reach: int) -> Tensor:
        """Return the tokens before each sequence, `[sequences, reach, C]`, for `Earlier`.

        All ranks must call this method and run its backward pass.
        """
        halo = HaloFunction.apply(RankSlice(self._context, self._tokens, reach + 1), x)
        first = torch.cat([x.new_zeros(reach - halo.shape[0], x.shape[-1]), halo])
        others = x.new_zeros(len(self.cu_seqlens) - 2, reach, x.shape[-1])
        return torch.cat([first.unsqueeze(0), others])

    def add_entering_state(
        self, o: Tensor, final: Tensor, reads: Tensor, log_decays: Tensor, *, reads_decayed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return o and the final states with the contributions of the entering state.

        All ranks must call this method and run its backward pass.

        Args:
            o: `[1, T, H, V]`, the outputs for a zero entering state.
            final: `[sequences, H, K, V]`, the final states for a zero entering state.
            reads: `[1, T, H, K]`, the factors of the state in o.
            log_decays: `[1, T, H, K]` or `[1, T, H, 1]`.
            reads_decayed: whether a token reads the state after its own decay.
        """
        own, wide = self._place.bounds, log_decays[0].to(final.dtype)
        log = wide[: own[1]]
        read_after = log if reads_decayed else F.pad(log, (0, 0, 0, 0, 1, -1))
        total = wide[own[-2] :].sum(0).exp().expand(*final.shape[1:3]).unsqueeze(-1)
        maps = GatherFunction.apply(torch.cat([total, final[-1]], -1), self._place.group)
        state = self._entering_state(maps)
        shown = read_after.cumsum(0).exp()
        added = torch.einsum("thk,hkv->thv", reads[0, : own[1]] * shown, state)
        first = (o[0, : own[1]] + added).to(o.dtype)
        behind = final[0] + log.sum(0).exp().unsqueeze(-1) * state
        return (
            torch.cat([first, o[0, own[1] :]]).unsqueeze(0),
            torch.cat([behind.unsqueeze(0), final[1:]]),
        )

    def _entering_state(self, maps: Tensor) -> Tensor:
        """Return the state `[H, K, V]` that enters the slice, from D and R of all ranks.

        It is zero if the slice's first sequence begins in the slice.
        """
        rank, before = self._place.rank, self._place.before
        if before == 0:
            return 0 * maps[rank, ..., 1:]
        state = maps[rank - before, ..., 1:].double()
        for decay_and_state in maps[rank - before + 1 : rank]:
            state = decay_and_state[..., :1] * state + decay_and_state[..., 1:]
        return state.to(maps.dtype)


class GatherFunction(torch.autograd.Function):
    """A differentiable all-gather: the gradient of x is the sum of its gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Return every rank's x, `[ranks, *x.shape]`."""
        ctx.group = group
        return gather(x, group)

    @staticmethod
    def backward(ctx: Any, d_all: Tensor) -> Any:
        """Return x's gradient."""
        rank = torch.distributed.get_rank(ctx.group)
        return gather(d_all, ctx.group)[:, rank].sum(0), None
