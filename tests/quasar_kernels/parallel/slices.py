"""Calls of the operators on one of several ranks; imported by the ranks' processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quasar_kernels.mount import mount

mount()

from fla.ops.cp import build_cp_context as build_fla_context  # noqa: E402
from fla.ops.quasar import chunk_quasar  # noqa: E402
from fla.ops.quasar.parallel.context import build_cp_context  # noqa: E402

from quasar_kernels.delta_rule import (  # noqa: E402
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_kda,
)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "quasar": chunk_quasar,
    "delta": chunk_delta_rule,
    "gated": chunk_gated_delta_rule,
    "kda": chunk_kda,
}


class Case(NamedTuple):
    """One row of packed sequences, cut into slices."""

    rule: str  # of FUNCTIONS
    inputs: dict[str, Tensor]  # [1, T, ...] by argument; beta may be [H]
    do: Tensor  # [1, T, H, V], the gradient of the output
    bounds: Sequence[int]
    lengths: Sequence[int]  # of the slices
    initial_state: Tensor | None = None  # [1, H, K, V], of a single sequence
    d_final: Tensor | None = None  # its final state's gradient


def run_cases(rank: int, cases: Sequence[Case], fla: bool = False) -> list[dict[str, Tensor]]:
    """Return this rank's results and gradients of each case by name; two runs must be equal.

    Args:
        fla: whether to use fla's context, for slices of equal lengths.
    """
    results = []
    for case in cases:
        first, second = _run_slice(rank, case, fla), _run_slice(rank, case, fla)
        assert all(torch.equal(first[name], second[name]) for name in first)
        results.append(first)
    return results


def _run_slice(rank: int, case: Case, fla: bool) -> dict[str, Tensor]:
    begin, end = [*pairwise([0, *accumulate(case.lengths)])][rank]
    bounds = torch.tensor(case.bounds)
    group: Any = dist.group.WORLD
    if fla:
        context = build_fla_context(bounds, group)
    else:
        context = build_cp_context(bounds, group, lengths=case.lengths)
    leaves = {
        name: (x[:, begin:end] if x.ndim > 1 else x).clone().requires_grad_()
        for name, x in case.inputs.items()
    }
    if case.initial_state is not None:
        leaves["initial_state"] = case.initial_state.clone().requires_grad_()
    run = FUNCTIONS[case.rule]
    o, final = run(**leaves, cp_context=context, output_final_state=True)
    results, incoming = [o], [case.do[:, begin:end].to(o.dtype)]
    if case.d_final is not None and context.post_num_ranks == 0:
        results, incoming = [o, final], [*incoming, case.d_final.to(final.dtype)]
    grads = torch.autograd.grad(results, [*leaves.values()], incoming)
    return {"o": o.detach(), "final": final.detach(), **dict(zip(leaves, grads, strict=True))}


def call_until_killed(rank: int, case: Case, folder: str) -> str:
    """Call repeatedly until another rank has been killed; return the error."""
    try:
        while True:
            _run_slice(rank, case, False)
            Path(folder, f"{rank}.calls").touch()
    except RuntimeError as error:
        return str(error)
