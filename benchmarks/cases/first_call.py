"""First calls and host time of the public functions, each in a new process with empty caches.

    python -m benchmarks first_call --out benchmarks/h200/first-call.json

The processes import everything and draw their inputs in parallel; then they are timed one after the
other. fla's delta rule, which tunes its kernels at the first call, is timed last and is killed
after `--fla-seconds`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module, metadata
from multiprocessing import get_context
from threading import BrokenBarrierError
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import clocks
from benchmarks.engine.limits import Criterion
from benchmarks.engine.processes import ProcessFailed, call
from benchmarks.engine.results import Entry, Run, start
from quasar_kernels.mount import mount

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"
TOKENS = 16_384
CALLS, WARM = 20, 5
SECONDS = 300.0
"""Time limit of a process."""
DELTA, GATED = "delta rule with norm, 12 x 128", "gated delta rule with norm, 12 x 128"

PROTOCOL = f"""\
Each call in a new process with empty caches of QUASAR_CACHE_DIR and Triton, which has imported \
everything, used the GPU and drawn its inputs; 16 cores for the compilers. One sequence of \
{TOKENS:,} tokens (decoding: 64 sequences, one token each), forward and backward pass except for \
decoding. First: seconds until the results of the first call. Host: milliseconds until the calls \
return, median of {CALLS}, with an idle GPU at the start. Wall: until their results, likewise. \
GPU: milliseconds of a CUDA graph's replay."""


def _operator(
    module: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *scalars: str,
    training: bool = True,
    **options: Any,
) -> Callable[[], Any]:
    function = getattr(import_module(module), name)
    x = {n: torch.randn(shape, device=DEVICE, dtype=dtype) for n in ("q", "k", "v")}
    if "beta" in scalars:
        x["beta"] = torch.rand(shape[:3], device=DEVICE, dtype=dtype)
    if "g" in scalars:
        x["g"] = -torch.rand(shape[:3], device=DEVICE)
    leaves = [y.requires_grad_(training) for y in x.values()]
    if not scalars:  # QuasarAttention's beta
        x["beta"] = torch.ones(shape[2], device=DEVICE)
    if not training:
        state = torch.zeros(shape[0], shape[2], shape[3], shape[3], device=DEVICE)
        options |= {"initial_state": state, "inplace_state": True}
    run = partial(function, **x, **options)
    return _trained(run, leaves, shape) if training else run


def _trained(
    run: Callable[[], Any], leaves: list[Tensor], shape: tuple[int, ...]
) -> Callable[[], Any]:
    gradients = {dtype: torch.randn(shape, device=DEVICE).to(dtype) for dtype in (BF16, FP16, FP32)}

    def both() -> Any:
        o = run()[0]
        return torch.autograd.grad(o, leaves, gradients[o.dtype])

    return both


def _module(width: int, name: str, module: str, **options: Any) -> Callable[[], Any]:
    torch.manual_seed(0)
    layer = getattr(import_module(module), name)(width, **options).to(DEVICE)
    x = torch.randn(1, TOKENS, width, device=DEVICE, requires_grad=True)

    def run() -> Any:
        with torch.autocast(DEVICE, BF16):
            return layer(x)

    return _trained(run, [x, *layer.parameters()], (1, TOKENS, width))


_RULE, _OPS, _BLOCKS = "quasar_kernels.delta_rule", "fla.ops.quasar", "quasar_kernels.blocks"
_NORM = {"use_qk_l2norm_in_kernel": True}
_LAYERS = "fla.layers.quasar"
CASES: dict[str, partial[Callable[[], Any]]] = {
    DELTA: partial(
        _operator, _RULE, "chunk_delta_rule", (1, TOKENS, 12, 128), BF16, "beta", **_NORM
    ),
    "delta rule, 8 x 96, fp16": partial(
        _operator, _RULE, "chunk_delta_rule", (1, TOKENS, 8, 96), FP16, "beta", **_NORM
    ),
    "delta rule, 8 x 64, fp32": partial(
        _operator, _RULE, "chunk_delta_rule", (1, TOKENS, 8, 64), FP32, "beta", **_NORM
    ),
    GATED: partial(
        _operator, _RULE, "chunk_gated_delta_rule", (1, TOKENS, 12, 128), BF16, "beta", "g", **_NORM
    ),
    "gated delta rule, decoding, 12 x 128": partial(
        _operator, _RULE, "fused_recurrent_gated_delta_rule", (64, 1, 12, 128), BF16, "beta", "g",
        training=False, **_NORM,
    ),
    "chunk_quasar, 8 x 64": partial(
        _operator, f"{_OPS}.chunk", "chunk_quasar", (1, TOKENS, 8, 64), BF16
    ),
    "fused_recurrent_quasar, decoding, 8 x 64": partial(
        _operator, f"{_OPS}.fused_recurrent", "fused_recurrent_quasar", (64, 1, 8, 64), BF16,
        training=False,
    ),
    "QuasarAttention, 512 channels": partial(
        _module, 512, "QuasarAttention", _LAYERS, head_dim=64, num_heads=8
    ),
    "QuasarAttention, 768 channels": partial(
        _module, 768, "QuasarAttention", _LAYERS, head_dim=64, num_heads=12
    ),
    "RWKV6TimeMixing, 512 channels": partial(_module, 512, "RWKV6TimeMixing", _BLOCKS, heads=8),
    "Mamba2, 512 channels": partial(_module, 512, "Mamba2", _BLOCKS, heads=16),
}  # fmt: skip
"""Functions that return a call of a public function, by description."""
BY_FLA = {
    DELTA: partial(
        _operator, "fla.ops.delta_rule", "chunk_delta_rule", (1, TOKENS, 12, 128), BF16, "beta",
        **_NORM,
    )
}  # fmt: skip
"""fla's own functions."""
MAX_FIRST_SECONDS = {**dict.fromkeys(CASES, 5.0), DELTA: 3.0}
MAX_WALL_MS = 0.9
"""Limit of the wall time of `DELTA`."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--match", default="", help="only calls with this text")
    parser.add_argument("--fla-seconds", type=float, default=SECONDS, help="0 omits fla")


def timed(name: str, by: str, ready: Any, turn: Any) -> dict[str, float]:
    """Return the figures of a call; runs in a new process.

    Args:
        ready: a barrier of all processes, or None.
        turn: a lock that the timed process holds, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"QUASAR_CACHE_DIR": f"{folder}/q", "TRITON_CACHE_DIR": f"{folder}/t"}
        mount()
        run = (BY_FLA if by == "fla" else CASES)[name]()
        _use_gpu()
        with suppress(BrokenBarrierError):  # another process failed; its entry has the reason
            if ready is not None:
                ready.wait(SECONDS)
        with turn or nullcontext():
            return _times(run)


def _use_gpu() -> None:
    """Initialise what a process needs once and is not this project's: cuBLAS and autograd."""
    x = torch.ones(512, 512, device=DEVICE, requires_grad=True)
    torch.autograd.backward((x @ x).sum())
    torch.cuda.synchronize()


def _times(run: Callable[[], Any]) -> dict[str, float]:
    first = clocks.single_ms(run, 1, 0).wall / 1e3
    single = clocks.single_ms(run, CALLS, WARM)
    times = {"first_s": first, "host_ms": single.host, "wall_ms": single.wall}
    with suppress(RuntimeError):  # some calls cannot be captured
        times["gpu_ms"] = clocks.graph_ms(run)
    return times


def measure(args: argparse.Namespace) -> Iterator[Run]:
    names = [name for name in CASES if args.match in name]
    context = get_context("spawn")
    ready, turn = context.Barrier(len(names)), context.Lock()
    run = start(
        "first_call", PROTOCOL, args.commit, versions={"fla-core": metadata.version("fla-core")}
    )

    def entry(name: str, by: str, *synchronised: Any, seconds: float = 2 * SECONDS) -> Entry:
        try:
            figures = call(timed, name, by, *synchronised, seconds=seconds)
        except ProcessFailed as error:
            return Entry(table="calls", of={"call": name}, by=by, failure=str(error))
        return Entry(table="calls", of={"call": name}, by=by, figures=figures)

    with ThreadPoolExecutor(len(names)) as pool:
        for found in pool.map(lambda name: entry(name, "ours", ready, turn), names):
            run = run.adding(found)
            yield run
    for name in BY_FLA if args.fla_seconds else ():
        if name in names:
            run = run.adding(entry(name, "fla", None, None, seconds=args.fla_seconds))
            yield run


def limits(run: Run) -> Iterator[Criterion]:
    for row in run.rows("calls"):
        name = str(row.of["call"])
        entry = row.by["ours"]
        if entry.failure:
            yield Criterion(f"{name}, timed", False, True, True)
            continue
        first = entry.figures["first_s"]
        yield Criterion(f"{name}, first call, s", first, MAX_FIRST_SECONDS[name])
        if name == DELTA:
            yield Criterion(f"{name}, wall, ms", entry.figures["wall_ms"], MAX_WALL_MS)
