"""KDA by the Triton kernels: tiles, segments, launches and autograd."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from fla.ops.quasar.device import is_recorded, on_its_device, once_differentiable
from fla.ops.quasar.segments import Segments, host_bounds, longest_of, packed_table
from fla.ops.quasar.triton_kernels.launch import Launcher, compile_ahead, padded
from fla.ops.quasar.triton_kernels.passes import scan_segments
from fla.ops.quasar.triton_kernels.plan import Plan, multiprocessors, plan_of
from torch import Tensor

from quasar_kernels.delta_rule.kda_cuda.launch import run_chunks
from quasar_kernels.delta_rule.kda_triton.backward import input_grad_kernel, state_grad_kernel
from quasar_kernels.delta_rule.kda_triton.forward import chunk_kernel, walk_kernel

WARPS = 8
"""Target number of walking warps per multiprocessor, over the whole call."""
WHOLE = 0.9
"""Programs per multiprocessor from which sequences are not cut: cut ones are walked twice."""
MIN_CHUNKS = 8
"""Smallest number of chunks of a segment."""
MIN_BLOCK = 64
"""Smallest number of channels of tiles; heads are padded to it. In kernels with narrower tiles,
ptxas 12.8 computes descriptors of shared memory from a register that it never wrote."""
MAX_ROWS = 65535
"""Largest second dimension of a CUDA grid."""

_chunk, _walk = map(Launcher, (chunk_kernel, walk_kernel))
_state_grad, _input_grad = map(Launcher, (state_grad_kernel, input_grad_kernel))


class Tiles(NamedTuple):
    """The tiles of the kernels for heads of one width."""

    chunk: int  # tokens
    keys: int  # columns of the keys that the kernels without a state load at once
    grad_keys: int  # columns of the keys of a program of the backward pass
    values: int  # columns of the values of a walking program
    chunk_warps: int
    walk_warps: int
    walk_stages: int  # of the forward pass; the backward pass loads more and has at most 2
    grad_warps: int


HOPPER = (9, 0)
"""The compute capability for which whole states were measured; others may lack shared memory."""


def tiles_for(block: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tiles:
    """Return the tiles for heads padded to `block` channels."""
    if dtype == torch.float32:
        return Tiles(32, min(32, block), min(32, block), min(32, block), 4, 8, 1, 4)
    values, warps, stages = min(64, block), 4, 1
    if block == 128 and capability == HOPPER:
        values, warps, stages = 128, 8, 3
    return Tiles(64, min(64, block), min(32, block), values, 4, warps, stages, 4)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER


class Inputs(NamedTuple):
    """A call's tensors, all contiguous."""

    q: Tensor  # [B, T, H / group, S], bf16, fp16 or fp32
    k: Tensor  # the same
    v: Tensor  # [B, T, H, S], the same dtype
    g: Tensor  # [B, T, H, S] fp32
    beta: Tensor  # [B, T, H] fp32
    initial_state: Tensor | None  # [sequences, H, S, S] fp32


class Chunks(NamedTuple):
    """The results of `chunk_kernel`, under the names of its arguments."""

    reads: Tensor
    values: Tensor | None  # None in the backward pass, which does not need it
    writes: Tensor
    queries: Tensor
    scores: Tensor
    inverse: Tensor | None  # None without a backward pass
    decays: Tensor


class Kept(NamedTuple):
    """What the backward pass needs besides the inputs and chunks."""

    fresh: Tensor | None
    checkpoints: Tensor | None
    G: Tensor | None


class Call(NamedTuple):
    """What is known of a call on the host."""

    plan: Plan
    tiles: Tiles
    scale: float


@functools.lru_cache(1024)
def _fastest(most: int, chunks: int, walks: int, places: int) -> int:
    """Return the number of segments, at most `most`, with the fewest steps of walking programs.

    A step of a segment's map takes about two thirds of the time of a step that computes outputs.

    Args:
        chunks: of the longest sequence.
        walks: programs that walk along one segment of each sequence and head.
        places: programs that run at once.
    """

    def cost(n: int) -> int:
        maps, outputs = -(-2 * (n - 1) * walks // places), -(-n * walks // places)
        return -(-chunks // n) * (2 * maps + 3 * outputs)

    return min(range(1, max(1, most) + 1), key=cost)


def plan_call(
    v: Tensor, cu_seqlens: Tensor | None, scale: float, segments: int | None = None
) -> Call:
    """Cut the sequences of v `[B, T, H, S]` into segments.

    Args:
        segments: replaces the built-in number of segments of the longest sequence.
    """
    B, T, H, S = v.shape
    tiles = tiles_for(padded(S, MIN_BLOCK), v.dtype, _capability(v.device))
    bounds = None if cu_seqlens is None else host_bounds(cu_seqlens)
    longest = T if bounds is None else longest_of(bounds)
    chunks = max(1, -(-longest // tiles.chunk))
    if segments is None:
        walks = max(1, B * T // max(longest, 1)) * H * -(-S // tiles.values)
        units = multiprocessors(v.device) or 4  # several segments in the interpreter
        segments = 1
        if walks < WHOLE * units:
            places = units * WARPS // tiles.walk_warps
            # the scan over segments is sequential, too
            most = min(places // walks, math.isqrt(2 * chunks), chunks // MIN_CHUNKS)
            segments = _fastest(most, chunks, walks, places)
    length = tiles.chunk * -(-chunks // segments)
    if bounds is None:
        count = max(1, -(-T // length))
        cut = Segments(B * count, B, count, length, None, None, length)
    else:
        packed = packed_table(bounds, length, v.device)
        cut = Segments(packed.table.shape[0], len(bounds) - 1, 0, 0, *packed)
    return Call(plan_of(v, cut), tiles, scale)


def _constants(call: Call, v: Tensor) -> dict[str, Any]:
    plan = call.plan
    return {
        "H": v.shape[2],
        "S": v.shape[3],
        "BS": padded(v.shape[3], MIN_BLOCK),
        "C": call.tiles.chunk,
        "PRECISION": plan.precision,
        "IS_VARLEN": plan.table is not None,
    }


def _sizes(call: Call, v: Tensor) -> tuple[int, int, int]:
    return v.shape[1], call.plan.per_sequence, call.plan.length


def _grid(call: Call, programs: int) -> tuple[int, int, int]:
    """Return the grid of a kernel with a number of programs for each chunk of a segment."""
    chunks = max(1, -(-call.plan.longest // call.tiles.chunk))
    rows = min(MAX_ROWS, chunks)
    return call.plan.total * programs, rows, -(-chunks // rows)


def _by_chunk(call: Call, v: Tensor) -> Tensor:
    """Allocate a transposed state for each chunk."""
    B, T, H, S = v.shape
    chunks = B * T // call.tiles.chunk + call.plan.total + 1
    return torch.empty(chunks, H, S, S, dtype=v.dtype, device=v.device)


def forward(
    call: Call, x: Inputs, output_final_state: bool, training: bool
) -> tuple[Tensor, Tensor | None, Chunks, Kept]:
    """Launch the forward pass on the current stream."""
    q, k, v, g, beta, initial_state = x
    plan, tiles, scale = call
    B, T, H, S = v.shape
    new = functools.partial(torch.empty, dtype=v.dtype, device=v.device)
    decays = new(B * T // tiles.chunk + plan.total + 1, H, S, dtype=torch.float32)
    W, U, writes, queries = (new(B, T, H, S) for _ in range(4))
    P = new(B, T, H, tiles.chunk)
    A = torch.empty_like(P) if training else None
    chunks = Chunks(W, U, writes, queries, P, A, decays)
    constants, sizes = _constants(call, v), _sizes(call, v)
    if not run_chunks(plan, x[:5], chunks, scale):
        _chunk(
            _grid(call, H),
            (q, k, v, g, beta, plan.table, *chunks, *sizes, scale),
            constants | {"SHARED": H // q.shape[2], "BK": tiles.keys},
            num_warps=tiles.chunk_warps, num_stages=1,
        )  # fmt: skip
    walk = constants | {"BV": tiles.values}
    options = {"num_warps": tiles.walk_warps, "num_stages": tiles.walk_stages}
    per_state = -(-S // tiles.values)
    stored = (chunks.reads, chunks.values, chunks.writes, chunks.queries, chunks.scores,
              chunks.decays, plan.table)  # fmt: skip
    G = states = None
    if plan.total > plan.sequences:
        G, states = torch.empty(2, plan.total, H, S, S, dtype=torch.float32, device=v.device)
        _walk((plan.total * H, 2 * per_state, 1),
              (*stored, *(None,) * 6, G, states, *sizes), walk, **options)  # fmt: skip
        scan_segments(plan, G, states, initial_state, v.dtype, backward=False)
    o, final, kept = torch.empty_like(v), None, Kept(None, None, G)
    if output_final_state:
        final = torch.empty(plan.sequences, H, S, S, dtype=torch.float32, device=v.device)
    if training:
        kept = Kept(torch.empty_like(v), _by_chunk(call, v), G)
    _walk((plan.total * H, per_state, 1),
          (*stored, states, initial_state, final, o, *kept[:2], None, None, *sizes),
          walk, **options)  # fmt: skip
    return o, final, chunks, kept


def backward(
    call: Call, x: Inputs, chunks: Chunks, kept: Kept, do: Tensor, d_final: Tensor | None
) -> Inputs:
    """Return the gradients, launched on the current stream; those of q and k have v's shape.

    do and d_final are contiguous, and d_final is fp32.
    """
    q, k, v, g, beta, initial_state = x
    plan, tiles, scale = call
    H, S = v.shape[2:]
    constants, sizes = _constants(call, v), _sizes(call, v)
    walk = constants | {"BV": tiles.values}
    options = {"num_warps": tiles.walk_warps, "num_stages": min(2, tiles.walk_stages)}
    grid = (plan.total * H, -(-S // tiles.values), 1)
    stored = (chunks.reads, chunks.writes, chunks.queries, chunks.scores, do, chunks.decays,
              plan.table)  # fmt: skip
    entering = None
    if kept.G is not None:
        entering = torch.empty_like(kept.G)
        _state_grad(grid, (*stored, None, d_final, *(None,) * 3, entering, *sizes), walk, **options)
        scan_segments(plan, kept.G, entering, None, v.dtype, backward=True)
    d_initial = None if initial_state is None else torch.empty_like(initial_state)
    d_fresh, d_states = torch.empty_like(v), _by_chunk(call, v)
    _state_grad(grid, (*stored, entering, d_final, d_initial, d_fresh, d_states, None, *sizes),
                walk, **options)  # fmt: skip
    group = H // q.shape[2]
    kind = v.dtype if group == 1 else torch.float32
    dq, dk = (torch.empty_like(v, dtype=kind) for _ in range(2))
    dv, dg = torch.empty_like(v), torch.empty_like(g)
    parts = -(-S // tiles.grad_keys)
    d_beta = torch.empty(parts, *beta.shape, device=v.device)
    _input_grad(
        _grid(call, H * parts),
        (q, k, v, g, beta, chunks.inverse, kept.fresh, do, d_fresh, kept.checkpoints, d_states,
         plan.table, dq, dk, dv, dg, d_beta, *sizes, scale, beta.numel() // H),
        constants | {"SHARED": group, "BK": tiles.grad_keys},
        num_warps=tiles.grad_warps, num_stages=1,
    )  # fmt: skip
    return Inputs(dq, dk, dv, dg, d_beta.sum(0), d_initial)


class KdaFunction(torch.autograd.Function):
    """Saves the inputs, the chunks' matrices, V' and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, call: Call, output_final_state: bool, *inputs: Any) -> Any:
        """Run the forward pass; `inputs` are those of `Inputs`."""
        x = _contiguous(*inputs)
        o, final, chunks, kept = forward(call, x, output_final_state, True)
        ctx.save_for_backward(*x, *chunks._replace(values=None), *kept)
        ctx.call, ctx.dtypes = call, [None if y is None else y.dtype for y in inputs]
        return o, final

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx: Any, do: Tensor, d_final: Tensor | None) -> Any:
        """Return the gradients of `forward`'s arguments."""
        saved = ctx.saved_tensors
        x, chunks, kept = Inputs(*saved[:6]), Chunks(*saved[6:13]), Kept(*saved[13:])
        do = do.to(x.v.dtype).contiguous()
        d_final = None if d_final is None else d_final.float().contiguous()
        found = backward(ctx.call, x, chunks, kept, do, d_final)
        shape = x.q.shape
        dq, dk = (y.view(*shape[:3], -1, shape[3]).sum(3) if y.shape != shape else y
                  for y in found[:2])  # fmt: skip
        gradients = (dq, dk, *found[2:])
        cast = (None if y is None else y.to(kind)
                for y, kind in zip(gradients, ctx.dtypes, strict=True))  # fmt: skip
        return None, None, *cast


def _contiguous(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> Inputs:
    state = None if initial_state is None else initial_state.float().contiguous()
    k, v = (x.to(q.dtype).contiguous() for x in (k, v))
    return Inputs(q.contiguous(), k, v, g.float().contiguous(), beta.float().contiguous(), state)


def kda_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    scale: float,
    segments: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute KDA by the Triton kernels, differentiably, on q's device, the current one.

    Args:
        q, k: `[B, T, H / group, S]`.
        v, g: `[B, T, H, S]`, S up to 128.
        beta: `[B, T, H]`.
        initial_state: `[sequences, H, S, S]` or None.
        cu_seqlens: the bounds of packed sequences, checked, or None.
        segments: replaces the built-in number of segments of the longest sequence.
    """
    inputs = (q, k, v, g, beta, initial_state)
    call = plan_call(v if v.dtype == q.dtype else v.to(q.dtype), cu_seqlens, scale, segments)
    recorded = is_recorded(*inputs)
    if q.is_cuda:
        plan = call.plan
        kinds = tuple(None if x is None else x.dtype for x in inputs)
        layout = plan.total > plan.sequences, plan.table is not None
        key = q.shape[2:], v.shape[2], kinds, layout, output_final_state, recorded
        x = _contiguous(*inputs) if key not in _seen else None
        if x is not None:
            _seen.add(key)
            compile_ahead(key, _passes, call, x, output_final_state, recorded)
    if recorded:
        o, final = KdaFunction.apply(call, output_final_state, *inputs)
        return o, final
    o, final, *_ = forward(call, _contiguous(*inputs), output_final_state, False)
    return o, final


_seen: set[Any] = set()  # kinds of calls whose kernels are being compiled, or are compiled


def _passes(call: Call, x: Inputs, output_final_state: bool, training: bool) -> None:
    o, final, chunks, kept = forward(call, x, output_final_state, training)
    if training:
        backward(call, x, chunks, kept, torch.empty_like(o), final)
