"""The exchange between ranks: an all-gather of the slices' maps, and their fold.

A slice maps the state that enters its last sequence to the state after it, S_out = G S_in + R. In
the backward pass, dS_in = G^T dS_out + E for its first sequence. Ranks exchange all matrices in
fp32 (fp64 for fp64 inputs) and multiply them in fp64, so that a chain of ranks adds no error. The
folds of this module are for slices in torch; cuda/scan/slice_forward.py has a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


# torch 2.13 renamed this function
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SliceMap(NamedTuple):
    """The affine map of a slice's last sequence; those of all ranks have a first axis [ranks]."""

    G: torch.Tensor  # [H, K, K]; unused if the sequence begins in the slice
    R: torch.Tensor  # [H, K, V]
    marked: torch.Tensor  # [H]: 1 where pass 1 stopped too early, so that a second round corrects R


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return x of all ranks, `[ranks, *x.shape]`, by one all-gather on the current stream.

    Raises:
        RuntimeError: a rank ended, or did not arrive within the group's timeout.
    """
    return _gather(x, group, False)[0].view(-1, *x.shape)


def start_gather(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Start `gather`; return a function that waits for it and returns its result.

    On a GPU the wait blocks the current stream, but not the host.
    """
    gathered, work = _gather(x, group, True)

    def finish() -> torch.Tensor:
        try:
            work.wait()
        except RuntimeError as error:
            raise _explained(error) from error
        return gathered.view(-1, *x.shape)

    return finish


def _gather(x: torch.Tensor, group: dist.ProcessGroup, asynchronous: bool) -> Any:
    own = x.flatten()
    gathered = own.new_empty(dist.get_world_size(group) * own.numel())
    try:
        return gathered, _all_gather(gathered, own, group=group, async_op=asynchronous)
    except RuntimeError as error:
        raise _explained(error) from error


def _explained(error: RuntimeError) -> RuntimeError:
    return RuntimeError(
        "the exchange of states between ranks failed: a rank has ended, or did not arrive within "
        "the process group's timeout. Look for the first error in the ranks' logs and start all "
        f"ranks again. ({str(error).splitlines()[0]})"
    )


def pack_map(G: torch.Tensor, R: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """Return the fields of a rank's `SliceMap` in one row, for the exchange."""
    return torch.cat([G.flatten(), R.flatten(), marked.to(R.dtype)])


def unpack_maps(rows: torch.Tensor, H: int, K: int, V: int) -> SliceMap:
    """Return views of rows `[ranks, H K (K + V) + H]` of `pack_map`."""
    G, R, marked = rows.split([H * K * K, H * K * V, H], 1)
    return SliceMap(G.unflatten(1, (H, K, K)), R.unflatten(1, (H, K, V)), marked)


def entering_state(maps: SliceMap, rank: int, before: int) -> torch.Tensor | None:
    """Return the state `[H, K, V]` that enters a rank's first sequence from `before` ranks."""
    if before == 0:
        return None
    first = rank - before
    state = maps.R[first]
    if before > 1:
        G, R = maps.G[first + 1 : rank].double(), maps.R[first:rank].double()
        wide = R[0]
        for n in range(before - 1):
            wide = torch.baddbmm(R[n + 1], G[n], wide)
        state = wide.to(state.dtype)
    return state


def leaving_gradient(
    G: torch.Tensor, E: torch.Tensor, rank: int, after: int
) -> torch.Tensor | None:
    """Return the gradient `[H, K, V]` of the state that leaves a rank's last sequence.

    Args:
        G: `[after - 1, H, K, K]`, of the later ranks that the sequence crosses.
        E: `[ranks, H, K, V]`, the offsets of all ranks' maps of the gradient.
    """
    if after == 0:
        return None
    gradient = E[rank + after]
    if after > 1:
        turned, own = G.double().mT, E[rank + 1 : rank + after + 1].double()
        wide = own[-1]
        for n in range(after - 2, -1, -1):
            wide = torch.baddbmm(own[n], turned[n], wide)
        gradient = wide.to(gradient.dtype)
    return gradient


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
