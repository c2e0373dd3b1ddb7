"""`run_chunks` with the states after every n tokens, from which later calls can continue."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from fla.ops.quasar.arguments import expect_sizes
from fla.ops.quasar.backend import has_kernels, scan_forward
from fla.ops.quasar.chunk_torch import split_tokens
from fla.ops.quasar.device import is_recorded
from fla.ops.quasar.operator_types import Scan, ScanInputs
from fla.ops.quasar.preparation import UNCHANGED, Preparation, prepare
from fla.ops.quasar.segments import host_bounds
from fla.ops.quasar.switches import requested_backend

IN_ONE_PASS = 128
"""Segments can end after every n tokens if n is a multiple of this, the kernels' largest tile."""

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""o, the final state, and the checkpoints `[B, T // n, H, K, V]`, all in one row if packed."""


def check_every(every: object, cp_context: Any) -> None:
    """Raise ValueError if `checkpoint_every` is not a size, or comes with a `cp_context`."""
    expect_sizes(checkpoint_every=every)
    if cp_context is not None:
        raise ValueError("checkpoint_every is not supported with a cp_context: omit one of them")


def run_with_checkpoints(
    every: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    g: torch.Tensor | None = None,
    how: Preparation = UNCHANGED,
) -> Results:
    """Compute `run_chunks` and the states after every `every` tokens of each sequence."""
    q, k, beta = prepare(how, q, k, beta)
    inputs = ScanInputs.of(q, k, v, beta, initial_state, cu_seqlens, scale, g)
    recorded = is_recorded(q, k, v, beta, initial_state, g)
    if q.numel() == 0:
        o, final = _run(inputs)
        return o, final, final.new_empty(q.shape[0], 0, *final.shape[1:])
    backend = requested_backend()
    if has_kernels(q) and backend != "torch" and not recorded and every % IN_ONE_PASS == 0:
        scan = scan_forward(inputs, True, backend=backend, every=every)
        return _of_segments(scan, every, _bounds(inputs))
    if cu_seqlens is None:
        return _by_parts(inputs, every)
    lengths = [stop - start for start, stop in pairwise(host_bounds(cu_seqlens))]
    sequences = split_tokens((q, k, v, beta, g), lengths)
    states = [None] * len(lengths) if initial_state is None else initial_state.split(1)
    results = [
        _by_parts(ScanInputs.of(*x[:4], state, None, scale, x[4]), every)
        for x, state in zip(sequences, states, strict=True)
    ]
    o, final, checkpoints = zip(*results, strict=True)
    return torch.cat(o, 1), torch.cat(final), torch.cat(checkpoints, 1)


def _run(x: ScanInputs) -> Any:
    from fla.ops.quasar.chunk import run_chunks  # imports this module

    q, k, v, (beta, _), initial_state, cu_seqlens, scale, g = x
    return run_chunks(q, k, v, beta, initial_state, True, cu_seqlens, scale, g)


def _by_parts(x: ScanInputs, every: int) -> Results:
    """Process `every` tokens per call, differentiably, of sequences that are not packed."""
    state: Any = x.initial_state
    outputs, found = [], []
    for q, k, v, beta, g in split_tokens((*x[:3], x.steps.values, x.g), every):
        o, state = _run(ScanInputs.of(q, k, v, beta, state, None, x.scale, g))
        outputs.append(o)
        found += [state] if q.shape[1] == every else []
    checkpoints = torch.stack(found, 1) if found else state.unsqueeze(1)[:, :0]
    return torch.cat(outputs, 1), state, checkpoints


def _bounds(x: ScanInputs) -> list[int]:
    B, T = x.q.shape[:2]
    return list(range(0, B * T + 1, T) if x.cu_seqlens is None else host_bounds(x.cu_seqlens))


def _of_segments(scan: Scan, every: int, bounds: list[int]) -> Results:
    """Return the results of a scan in which a segment ends at each checkpoint."""
    final: Any = scan.final_state
    _, _, states, cut = scan.saved
    length = cut.length or cut.longest
    rows, ends, first = [], {}, 0
    for n, (start, stop) in enumerate(pairwise(bounds)):
        count = (stop - start) // every
        rows += [first + (i + 1) * every // length - 1 for i in range(count)]
        if count * every == stop - start > 0:
            ends[len(rows) - 1] = n  # `states` lacks those after a sequence's last segment
        first += max(1, -(-(stop - start) // length))
    found = final.new_empty(len(rows), *final.shape[1:])
    if states is not None:
        torch.index_select(states, 0, torch.tensor(rows, device=final.device), out=found)
    if ends:
        of, at = (torch.tensor(list(x), device=final.device) for x in (ends.values(), ends))
        found[at] = final[of]
    B = scan.o.shape[0]
    return scan.o, final, found.view(B, len(rows) // B, *final.shape[1:])


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
