"""Kimi Delta Attention: this project's functions and fla's.

    python -m benchmarks kda --out benchmarks/h200/kda.json

The case times the forward pass, forward and backward, and decoding, and compares outputs and
gradients with float64. `triton` is quasar_kernels.delta_rule; `fla` is fla's function of that name.
cuLA and FlashKDA have no packages, so they are not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import clocks, comparison, tuning
from benchmarks.engine.comparison import CHECKED, WAYS, Comparison, Function, Inputs, Shape, Way
from benchmarks.engine.limits import GRADIENT_ERROR, OUTPUT_ERROR, Criterion
from benchmarks.engine.results import Row, Run, start
from benchmarks.mechanisms.kda import draw
from quasar_kernels.delta_reference import delta_chunked
from quasar_kernels.mount import mount

OURS, FLA = "triton", "fla"
WIDTH, SEQUENCES, EACH = 128, 16, 1000
CALLS = [(Shape(1, 16_384, heads, WIDTH), False) for heads in (8, 32)]
CALLS.append((Shape(1, SEQUENCES * EACH, 32, WIDTH), True))
"""Shapes, and whether the row consists of packed sequences."""
CHECKED_TOKENS: dict[Way, int] = {"forward": 16_384, "forward and backward": 2048}
LEADS: dict[Way, float] = {"forward": 2, "forward and backward": 1.5}
"""Least speed-up over fla."""
DECODED = Shape(64, 1, 32, WIDTH)

PROTOCOL = f"""\
bf16, q and k of unit length, log decays per channel in fp32 as a fresh KDA layer makes them. fla: \
the functions of the same names and arguments, whose autotuner tries each variant of a kernel for \
{tuning.TRIAL_MS} ms. Packed: {SEQUENCES} sequences of {EACH:,} tokens in one row. Outputs (of the \
first sequence) and gradients (over its first 2,048 tokens) are compared with float64. {CHECKED} \
{clocks.CLOCKS} Packed calls are timed eagerly, because they read the bounds on the host. \
Decoding: one token of 64 sequences, alternating states, so that they are not in the L2 cache, \
quasar_kernels' updated in place; the copy is of such states."""


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator by short chunks, in the inputs' dtype."""
    scale = x["q"].shape[-1] ** -0.5
    return delta_chunked(
        x["q"], x["k"], x["v"], x["beta"], x["g"], state, bounds, scale=scale, chunk=16
    )


def function_of(name: str, kind: str) -> Callable[..., Any]:
    module = "quasar_kernels.delta_rule" if name == OURS else "fla.ops.kda"
    function: Callable[..., Any] = getattr(import_module(module), f"{kind}_kda")
    return function


@contextmanager
def selected(bounds: Tensor | None, name: str) -> Iterator[Function]:
    """Yield an implementation's function from inputs to the output of whole sequences."""
    function = function_of(name, "chunk")
    yield lambda x: function(**x, cu_seqlens=bounds)[0]


def step(name: str, x: Inputs, state: Tensor) -> Tensor:
    """Decode one token: our function updates the state in place, fla's writes a new one."""
    keep = {"output_final_state": True} if name == FLA else {"inplace_state": True}
    o: Tensor = function_of(name, "fused_recurrent")(**x, initial_state=state, **keep)[0]
    return o


def measure(args: argparse.Namespace) -> Iterator[Run]:
    mount()
    tuning.tune_quickly()
    torch.manual_seed(0)
    run = start("kda", PROTOCOL, args.commit, versions={"fla-core": metadata.version("fla-core")})
    with torch.no_grad():
        clocks.soak(2)
        x, names = draw(DECODED, "cuda"), (OURS, FLA)
        state = torch.randn(DECODED.batch, DECODED.heads, WIDTH, WIDTH, device="cuda")
        of: dict[str, Any] = {"batch": DECODED.batch, "heads": DECODED.heads}
        steps = {name: partial(step, name) for name in names}
        run = run.adding(*comparison.decoding(of, x, state, steps, exact))
        for way in WAYS:
            for shape, is_packed in CALLS:
                x = draw(shape, "cuda")
                bounds = torch.arange(0, shape.tokens + 1, EACH, device="cuda")
                tokens = min(CHECKED_TOKENS[way], EACH if is_packed else shape.tokens)
                select = partial(selected, bounds if is_packed else None)
                time = eagerly if is_packed else comparison.timing
                compared = Comparison(select, exact, {way: tokens}, time)
                of = {"way": way, **shape._asdict(), "packed": is_packed}
                run = run.adding(*compared.entries(of, way, x, torch.randn_like(x["v"]), names))
                del x
                clocks.free()
                yield run


def eagerly(call: Callable[[], object], rested: bool) -> dict[str, float]:  # noqa: ARG001
    return {"eager_ms": clocks.eager_ms(call)}


def call_name(row: Row) -> str:
    of = row.of
    tokens = f"{SEQUENCES} x {EACH:,}, packed" if of["packed"] else f"{of['tokens']:,}"
    return f"{of['way']}, {tokens}, {of['heads']} heads"


def limits(run: Run) -> Iterator[Criterion]:
    for row in run.rows("calls"):
        text, way, ours = call_name(row), row.of["way"], row.by[OURS]
        kind = "eager_ms" if row.of["packed"] else "graph_ms"
        if (lead := row.ratio(kind, FLA, OURS)) is not None:
            yield Criterion(f"{text}, times fla", lead, LEADS[way], True)
        if ours.failure:
            yield Criterion(f"{text}, timed", False, True, True)
            continue
        limit = OUTPUT_ERROR if way == "forward" else GRADIENT_ERROR
        for tensor, error in ours.errors.items():
            yield Criterion(f"{text}, error of {tensor}", error, limit)
        yield Criterion(f"{text}, same bits", ours.figures["repeats"], True, True)
    for row in run.rows("decoding"):
        if (lead := row.ratio("graph_ms", FLA, OURS)) is not None:
            yield Criterion(f"decoding of {row.of['batch']} sequences, times fla", lead, 1, True)
