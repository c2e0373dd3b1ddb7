"""q, k and v of tokens at the start of sequences, for kernels that process one long sequence.

Such a kernel can take several sequences that follow each other in memory as one: only the
convolution of each one's first tokens then reads tokens of the sequence before. Those few tokens
are computed a second time here, and replace the kernel's results.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fla.ops.quasar.layer.call import Call, Weights


def project_rows(call: Call, rows: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Return silu(causal convolution(rows W^T)) of q, k and v side by side, in fp32 products.

    Args:
        rows: `[N, n, hidden]`, the first tokens of N sequences.

    Returns:
        `[N, n, 3 H S]` in the call's dtype.
    """
    taps, shift = weights.joined_taps()
    matrix = torch.cat([weights.q, weights.k, weights.v])
    products = F.linear(rows.to(call.dtype).float(), matrix.to(call.dtype).float())
    mixed = F.conv1d(
        F.pad(products.mT, (taps.shape[1] - 1, 0)),
        taps.float().unsqueeze(1),
        None if shift is None else shift.float(),
        groups=taps.shape[0],
    )
    return F.silu(mixed.mT).to(call.dtype)


def replace_first_tokens(
    call: Call, x: torch.Tensor, weights: Weights, bounds: torch.Tensor, qkv: torch.Tensor
) -> None:
    """Overwrite q, k and v of each sequence's first tokens by those without tokens before them.

    Nothing is copied to the host.

    Args:
        x: `[R, hidden]`, all sequences, one after the other.
        bounds: `[N + 1]`, the sequences' bounds in x; a sequence may be empty.
        qkv: `[R, 3 H S]`, as `project_rows` returns it.
    """
    first, lengths = bounds[:-1], bounds.diff()
    first = torch.where(lengths > 0, first, 0)  # in place of an empty one, the row's first again
    count: int = weights.q_taps.shape[-1] - 1
    place = torch.arange(count, device=x.device).minimum((lengths - 1).clamp(min=0).unsqueeze(1))
    rows = first.unsqueeze(1) + place  # short sequences repeat their last token
    new = project_rows(call, x[rows], weights)
    new = new.gather(1, place.unsqueeze(2).expand_as(new))
    qkv.index_copy_(0, rows.flatten(), new.flatten(0, 1))


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
