"""Calls of the scan for the tests of emulated kernels, and their float64 results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from fla.ops.quasar.cuda.program import CudaProgram, LoadedProgram
from fla.ops.quasar.cuda.scan.scan_forward import options_for, step_options
from fla.ops.quasar.operator_types import ScanInputs
from fla.ops.quasar.segments import Segments, packed_table
from torch import Tensor

from quasar_kernels.delta_reference import delta_chunked
from quasar_kernels.reference import step_size
from tests.quasar_kernels.cuda.emulated.programs import Programs
from tests.quasar_kernels.delta_rule.calls import inputs
from tests.quasar_kernels.inputs import layer_like, packed

OWN, READ = "own", "read"
"""Kinds of calls: QuasarAttention's step sizes from beta `[H]`, or step sizes as input."""
Kind = str | float
"""A number is a decay: the call then has step sizes and log decays as inputs."""


class Call(NamedTuple):
    """A call's tensors."""

    q: Tensor  # [B, T, H / group, S]
    k: Tensor
    v: Tensor  # [B, T, H, S]
    beta: Tensor  # [H] or [B, T, H] fp32
    g: Tensor | None  # [B, T, H] fp32
    initial_state: Tensor | None = None  # [N, H, S, S] fp32
    bounds: Tensor | None = None  # of packed sequences

    def load(self, programs: Programs, program: CudaProgram, late: bool = False) -> LoadedProgram:
        """Return the program for the call."""
        options = options_for(self.q.shape[-1]) + step_options(self.inputs())
        return programs.load(program, self.q.dtype, options, late)

    def inputs(self, scale: float = 1.0) -> ScanInputs:
        """Return the scan's inputs."""
        return ScanInputs.of(*self[:4], self.initial_state, self.bounds, scale, self.g)

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that have a gradient, by name."""
        names = ("q", "k", "v", "beta", "g", "initial_state")
        return {name: x for name in names if (x := getattr(self, name)) is not None}


def draw(
    kind: Kind,
    tokens: int | Sequence[int],
    *,
    B: int = 1,
    width: int = 64,
    group: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Call:
    """Draw B rows of `tokens` tokens, or packed sequences of these lengths, and initial states.

    q and k have two heads, and v has `group` heads for each of them.
    """
    bounds = None if isinstance(tokens, int) else packed(tokens)
    T = tokens if isinstance(tokens, int) else sum(tokens)
    sequences = B if isinstance(tokens, int) else len(tokens)
    state = torch.randn(sequences, 2 * group, width, width)
    if kind == OWN:
        q, k, v, beta = layer_like(T, B, S=width, dtype=dtype)
        return Call(q, k, v, beta, None, state, bounds)
    decay = 0.0 if kind == READ else float(kind)
    x = inputs(T, B, K=width, group=group, dtype=dtype, decay=decay)
    x.beta[:, ::5] = 0
    return Call(x.q, x.k, x.v, x.beta, None if kind == READ else x.g, state, bounds)


def exact(x: Call, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute o and the final state in float64."""
    x = each_head(x)
    return delta_chunked(*x[:3], _steps(x), *x[4:], scale=scale)


def each_head(x: Call) -> Call:
    """Repeat the heads of q and k for those of v that share them."""
    group = x.v.shape[2] // x.q.shape[2]
    return x._replace(q=x.q.repeat_interleave(group, 2), k=x.k.repeat_interleave(group, 2))


class Maps(NamedTuple):
    """The segments' maps, S -> G S + R, and the states after them, `[total, H, S, S]` each."""

    G: Tensor
    R: Tensor
    states: Tensor


def cut_by(x: Call, length: int) -> Segments:
    """Cut the sequences of a call into segments of `length` tokens."""
    B, T = x.k.shape[:2]
    if x.bounds is not None:
        table = packed_table(x.bounds.tolist(), length, x.k.device, longest_first=True)
        return Segments(len(table.table), len(x.bounds) - 1, 0, 0, *table)
    count = -(-T // length)
    return Segments(B * count, B, count, length, None, None, length)


def exact_maps(x: Call, cut: Segments) -> Maps:
    """Compute the maps of `cut` in float64."""
    x = each_head(x)
    B, T, H, S = x.k.shape
    table = packed_table([0, T], cut.length, x.k.device).table if cut.table is None else cut.table
    steps, eye = _steps(x), torch.eye(S, dtype=torch.float64).expand(1, H, S, S)
    maps = []
    for b in range(B):
        for sequence, begin, tokens, place in table.tolist():
            at = slice(b, b + 1), slice(begin, begin + tokens)
            k, v, beta = x.k[at], x.v[at], steps[at]
            g = None if x.g is None else x.g[at]
            if place & 1:
                state = torch.zeros_like(eye)
                if x.initial_state is not None:
                    state = x.initial_state[b + sequence, None].double()
            R = delta_chunked(k, k, v, beta, g)[1]
            G = delta_chunked(k, k, torch.zeros_like(v), beta, g, eye)[1]
            state = G @ state + R
            maps.append((G, R, state))
    return Maps(*(torch.cat(parts) for parts in zip(*maps, strict=True)))


def _steps(x: Call) -> Tensor:
    if x.beta.ndim == 3:
        return x.beta
    return step_size(x.k.double().square().sum(-1), x.beta.double())
