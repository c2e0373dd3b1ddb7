"""The operator's forward pass and decoding: this project's and the baseline's.

    python -m benchmarks operator --out benchmarks/h200/operator.json [--quick]

The case measures speed, accuracy against float64, memory, decoding, and what early stops of pass 1
gain. `triton` and `cuda` are this project's operator with QUASAR_BACKEND of that name; `baseline`
is fla's delta rule with the step size. --quick omits the baseline.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.engine import clocks, comparison
from benchmarks.engine import inputs as made
from benchmarks.engine.clocks import free, graph_ms, rested_ms
from benchmarks.engine.comparison import (
    CHECKED,
    Checked,
    Function,
    Inputs,
    Step,
    checked,
    timing,
)
from benchmarks.engine.limits import COPY_SHARE, Criterion
from benchmarks.engine.results import Entry, Run, start
from harness.worker.compare import figures
from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, step_size

OURS, BASELINE = ("triton", "cuda"), "baseline"
NAMES = (*OURS, BASELINE)
LENGTHS = (2048, 16_384, 100_000, 262_144, 1_000_000)
FORGETTING_LENGTHS, SLOW_HEADS = (200_000, 1_000_000), (0, 1, 2, 8)
BATCHES = (1, 8, 32, 128)

FORWARD_MS = {
    "triton": {2048: 0.06, 16_384: 0.15, 100_000: 0.55, 1_000_000: 4.5},
    "cuda": {2048: 0.03, 16_384: 0.07, 100_000: 0.24, 1_000_000: 1.8},
}
"""Limits on the forward pass's time by tokens, with graph replay.

CUDA must also be faster than Triton, in the same run and at every length.
"""
ERRORS = {"layer-like": 6e-3, "correlated 10%": 9e-3, "correlated 1%": 9e-3}
"""Largest accepted relative RMS error by kind of keys.

CUDA's errors must also be at most Triton's, in the same run and at every length.
"""
SEARCH_COST = 1.05
"""Longest accepted time of a call with early stops, over its time without them: if no head can
stop, the checks only cost time."""
MEMORY_TIMES_OUTPUT = 1.2

PROTOCOL = f"""\
B = 1, H = 8, S = 64, bf16, inputs as a layer with default weights makes them. Triton and CUDA: \
chunk_quasar without gradients. Baseline: chunk_delta_rule with scale 1, the step size by torch. \
Each output is compared with the float64 chunk form before it is timed. {CHECKED} {clocks.CLOCKS} \
{clocks.RESTED} Forgetting: CUDA alone; keys are noise in all directions, beta is 1, and 0.001 in \
slow heads. Decoding: alternating states, so that they are not in the L2 cache, ours updated in \
place; the baseline gets its step size as an input and writes a new state; the copy is the faster \
of the driver's and of an elementwise kernel."""


def named(inputs: made.Inputs) -> Inputs:
    """Return q, k, v and beta by name."""
    return dict(zip(("q", "k", "v", "beta"), inputs, strict=True))


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator in float64 by the chunk form."""
    return quasar_chunked(x["q"], x["k"], x["v"], x["beta"], state, bounds, chunk=128)


@contextmanager
def selected(name: str) -> Iterator[Function]:
    """Yield the operator of that name; its kernels stay selected while the context is open."""
    if name == BASELINE:
        yield _baseline
        return
    with patch.dict(os.environ, {"QUASAR_BACKEND": name}):
        yield _ours


def _ours(x: Inputs) -> Tensor:
    from fla.ops.quasar import chunk_quasar

    o: Tensor = chunk_quasar(**x)[0]
    return o


def _baseline(x: Inputs) -> Tensor:
    from fla.ops.delta_rule import chunk_delta_rule

    alpha = step_size(x["k"].float().square().sum(-1), x["beta"])
    o: Tensor = chunk_delta_rule(x["q"], x["k"], x["v"], alpha, scale=1.0)[0]
    return o


def decoders(x: Inputs) -> Mapping[str, Step]:
    """Return the calls that decode one token, by implementation."""
    from fla.ops.delta_rule import fused_recurrent_delta_rule
    from fla.ops.quasar import fused_recurrent_quasar

    q, k, v, beta = x.values()
    alpha = step_size(k.float().square().sum(-1), beta)
    return {
        "triton": lambda _, s: fused_recurrent_quasar(q, k, v, beta, s, inplace_state=True)[0],
        BASELINE: lambda _, s: fused_recurrent_delta_rule(q, k, v, alpha, 1.0, s, True)[0],
    }


def compared(o: Tensor, expected: Tensor, name: str) -> dict[str, float]:
    result = figures(o, expected)
    return {name: result.relative_rms, "worst eighth": result.worst_part}


def output_checked(name: str, x: Inputs, expected: Tensor) -> Checked:
    with selected(name) as run:
        return checked(lambda: {"o": run(x)}, {"o": expected}, compared)


def measure_length(tokens: int, names: Sequence[str]) -> Iterator[Entry]:
    """Check the outputs of one length for all kinds of keys, then time it."""
    inputs = made.layer_like(tokens)
    for keys, noise in {"layer-like": None, **made.NOISE}.items():
        used = named(inputs if noise is None else made.correlated(inputs, noise))
        expected, of = exact(used, None, None)[0], {"tokens": tokens, "keys": keys}
        for name in names:
            if noise is None or name != BASELINE:
                errors, same = output_checked(name, used, expected)
                bits = {"repeats": same}
                yield Entry(table="accuracy", of=of, by=name, figures=bits, errors=errors)
        del expected, used
        free()
    x = named(inputs)
    of = {"tokens": tokens, "output_bytes": x["q"].numel() * x["q"].element_size()}
    for name in names:
        with selected(name) as run:
            peak = clocks.peak_bytes(partial(run, x))
            times = timing(partial(run, x), rested=name == "cuda")
        yield Entry(table="forward", of=of, by=name, figures={**times, "peak_bytes": peak})


def measure_forgetting() -> Iterator[Entry]:
    """Check and time CUDA's forward pass if heads forget, with and without early stops."""
    from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan

    for tokens in FORGETTING_LENGTHS:
        for slow in SLOW_HEADS:
            x = named(made.forgetting(tokens, slow))
            error = output_checked("cuda", x, exact(x, None, None)[0]).errors["o"]
            free()
            with selected("cuda") as run:
                call = partial(run, x)
                times = {"graph_ms": graph_ms(call), "rested_ms": rested_ms(call)}
                with patch.object(cuda_scan, "LONG", sys.maxsize):  # pass 1 never stops
                    full = {"full_graph_ms": graph_ms(call), "full_rested_ms": rested_ms(call)}
            yield Entry(
                table="forgetting",
                of={"tokens": tokens, "slow_heads": slow},
                by="cuda",
                figures={**times, **full},
                errors={"o": error},
            )
            del x, call
            free()


def measure_decoding(names: Sequence[str]) -> Iterator[Entry]:
    """Check and time one token at several batch sizes, and copies of the states."""
    for batch in BATCHES:
        x = named(made.layer_like(1, batch))
        state = torch.randn(batch, made.HEADS, made.WIDTH, made.WIDTH, device="cuda")
        steps = {name: step for name, step in decoders(x).items() if name in names}
        yield from comparison.decoding({"batch": batch}, x, state, steps, exact)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="omit the baseline")


def chosen(args: argparse.Namespace) -> tuple[str, ...]:
    return OURS if args.quick else NAMES


def baseline_version(names: Sequence[str]) -> dict[str, str]:
    """Return the version of the baseline's package, if it is measured."""
    return {"fla-core": metadata.version("fla-core")} if BASELINE in names else {}


def measure(args: argparse.Namespace) -> Iterator[Run]:
    names = chosen(args)
    mount()
    torch.manual_seed(0)
    run = start("operator", PROTOCOL, args.commit, versions=baseline_version(names))
    with torch.no_grad():
        clocks.soak(2)
        run = run.adding(*measure_decoding(names))
        run = run.adding(copy_gb_per_s=clocks.copy_bandwidth())
        free()
        for tokens in LENGTHS:
            run = run.adding(*measure_length(tokens, names))
            free()
            yield run
        yield run.adding(*measure_forgetting())


def limits(run: Run) -> Iterator[Criterion]:
    yield from _speed_limits(run)
    for row in run.rows("accuracy"):
        keys, errors = row.of["keys"], {n: row.by[n].errors for n in OURS if n in row.by}
        where = f"error of {row.of['tokens']} tokens, {keys}"
        for name, by_output in errors.items():
            text = f"{where}, {name}"
            yield Criterion(text, by_output["o"], ERRORS[keys])
            yield Criterion(f"{text}, worst eighth", by_output["worst eighth"], ERRORS[keys] * 1.05)
            if (same := row.by[name].figures.get("repeats")) is not None:
                yield Criterion(f"{text}, same bits", same, True, True)
        if "cuda" in errors:
            share = errors["cuda"]["o"] / errors["triton"]["o"]
            yield Criterion(f"{where}, cuda over triton", share, 1.0)
    for entry in run.table("forgetting"):
        text = f"{entry.of['tokens']} tokens, {entry.of['slow_heads']} slow heads"
        yield Criterion(f"error of {text}", entry.errors["o"], ERRORS["layer-like"])
        share = entry.figures["rested_ms"] / entry.figures["full_rested_ms"]
        yield Criterion(f"forward of {text}, over one without early stops", share, SEARCH_COST)
    longest = run.rows("forward")[-1]
    for name in (n for n in OURS if n in longest.by):
        share = longest.by[name].figures["peak_bytes"] / longest.of["output_bytes"]
        yield Criterion(f"peak memory over the output, {name}", share, MEMORY_TIMES_OUTPUT)


def _speed_limits(run: Run) -> Iterator[Criterion]:
    for row in run.rows("forward"):
        tokens = row.of["tokens"]
        text = f"forward of {tokens} tokens"
        for name in (n for n in OURS if n in row.by and tokens in FORWARD_MS[n]):
            ms = row.by[name].figures["graph_ms"]
            yield Criterion(f"{text}, {name}, ms", ms, FORWARD_MS[name][tokens])
        if (share := row.ratio("graph_ms", "cuda", "triton")) is not None:
            yield Criterion(f"{text}, cuda over triton", share, 1.0)
    rows = run.rows("decoding")
    largest = max(rows, key=lambda row: int(row.of["batch"]))
    share = largest.ratio("graph_ms", "copy", "triton") or 0
    what = f"share of copy bandwidth, B = {largest.of['batch']}"
    yield Criterion(what, share, COPY_SHARE, True)
    for row in rows:
        for kind in ("graph_ms", "eager_ms"):
            triton, baseline = (row.figure(name, kind) for name in ("triton", BASELINE))
            if triton is not None and baseline is not None:
                yield Criterion(f"decoding at B = {row.of['batch']}, {kind}", triton, baseline)
