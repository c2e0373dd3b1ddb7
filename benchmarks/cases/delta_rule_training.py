"""Training with the gated delta rule, at FlashQLA's shapes and with packed and batched sequences.

    python -m benchmarks delta_rule_training --out benchmarks/h200/delta-rule-training.json

`cuda` is quasar_kernels.delta_rule. FlashQLA and FlashInfer are measured if they are installed.
--earlier FILE adds, as `earlier`, the times of another commit. Measure FILE by the same command in
that commit's tree, just before and on the same GPU.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cases import delta_rule
from benchmarks.cases.delta_rule import CHECKED_TOKENS, GATED, call_name, draw, rest
from benchmarks.cases.delta_rule_libraries import LIBRARIES, versions
from benchmarks.engine import clocks
from benchmarks.engine.comparison import CHECKED, WAYS, Shape, gradients
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Row, Run, load, start
from quasar_kernels.mount import mount

SHAPES = (
    *(Shape(1, 32_768, heads, 128) for heads in (8, 32, 64)),
    Shape(16, 8192, 64, 128),
    delta_rule.LONG,
)
"""FlashQLA's own shapes, and a long sequence."""
SEQUENCES, SHORTEST, LONGEST = 64, 100, 4000
HEADS = ((8, 128), (32, 128), (8, 64))
"""Heads and width of the packed and batched calls."""
PACKED_SHARE = 1.15
"""Longest accepted time per token of packed sequences, as a multiple of one long sequence's."""
CUDA, EARLIER = "cuda", "earlier"

PROTOCOL = f"""\
bf16, inputs as in the case delta_rule. Whole sequences: at FlashQLA's own shapes. Packed: \
{SEQUENCES} sequences of {SHORTEST} to {LONGEST:,} tokens in one call, compared with one sequence \
of as many tokens, and with a batch of {SEQUENCES} sequences of 2,048; forward and backward. \
{CHECKED} {clocks.CLOCKS}"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--earlier", type=Path, help="the file of another commit's run")
    parser.add_argument("--checked", type=int, help="at most as many tokens are checked")


def packed_bounds() -> list[int]:
    """Return the bounds of sequences of random lengths, the same in all runs."""
    lengths = random.Random(0)
    counts = (lengths.randint(SHORTEST, LONGEST) for _ in range(SEQUENCES))
    return [0, *itertools.accumulate(counts)]


def packed_calls() -> Iterator[Entry]:
    """Time forward and backward of one long, of packed and of batched sequences."""
    bounds = packed_bounds()
    for heads, width in HEADS:
        for kind in ("long", "packed", "batched"):
            batch, tokens = (SEQUENCES, 2048) if kind == "batched" else (1, bounds[-1])
            x = draw(GATED, Shape(batch, tokens, heads, width))
            ends = torch.tensor(bounds, device="cuda") if kind == "packed" else None
            with delta_rule.function_of(CUDA, GATED) as function:

                def output(x: dict[str, Tensor], ends: Tensor | None = ends) -> Tensor:
                    o: Tensor = function(x["q"], x["k"], x["v"], **rest(x), cu_seqlens=ends)[0]
                    return o

                call = partial(gradients, output, x, torch.randn_like(x["q"]))
                ms = {"graph_ms": clocks.graph_ms(call), "eager_ms": clocks.eager_ms(call)}
            tokens *= batch
            of = {"rule": GATED, "heads": heads, "width": width, "sequences": kind}
            figures = {**ms, "tokens": tokens, "token_ns": ms["graph_ms"] / tokens * 1e6}
            yield Entry(table="packed", of=of, by=CUDA, figures=figures)
            del x, call
            clocks.free()


def measure(args: argparse.Namespace) -> Iterator[Run]:
    mount()
    torch.manual_seed(0)
    installed, missing = versions()
    run = start("delta_rule_training", PROTOCOL, args.commit, versions=installed).adding(
        **{f"{name} is missing": why for name, why in missing.items()}
    )
    if args.checked:
        run = run.adding(checked=args.checked)
    if args.earlier:
        earlier = load(args.earlier)
        run = run.adding(
            *(e.model_copy(update={"by": EARLIER}) for e in earlier.entries if e.by == CUDA),
            earlier=earlier.commit or "unknown",
        )
    with torch.no_grad():
        clocks.soak(2)
        for way, shape in itertools.product(WAYS, SHAPES):
            x = draw(GATED, shape)
            names = [
                name for name in (CUDA, *installed) if delta_rule.supports(name, GATED, way, shape)
            ]
            tokens = {"forward": shape.tokens, "forward and backward": CHECKED_TOKENS}[way]
            comparison = delta_rule.comparison_of(GATED, shape.tokens)
            if args.checked:
                tokens = min(tokens, args.checked)
            comparison = comparison._replace(checked_tokens={way: tokens})
            of = {"rule": GATED, "way": way, **shape._asdict()}
            run = run.adding(*comparison.entries(of, way, x, torch.randn_like(x["q"]), names))
            del x
            clocks.free()
            yield run
        for entry in packed_calls():
            run = run.adding(entry)
            yield run


def packed_name(row: Row) -> str:
    return "{sequences}, {heads} x {width}".format(**row.of)


def long_of(run: Run, row: Row) -> Row:
    """Return the row of one long sequence with the heads of a packed or batched row."""
    heads = {**row.of, "sequences": "long"}
    return next(one for one in run.rows("packed") if one.of == heads)


def over_long(run: Run, row: Row, by: str = CUDA) -> float | None:
    """Return the time per token as a multiple of one long sequence's."""
    token, long = row.figure(by, "token_ns"), long_of(run, row).figure(by, "token_ns")
    return None if token is None or long is None else token / long


def share_of_best(row: Row) -> float | None:
    """Return CUDA's speed as a share of the fastest other library's; None without one."""
    ratios = (row.ratio("graph_ms", name, CUDA) for name in LIBRARIES)
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def limits(run: Run) -> Iterator[Criterion]:
    yield from delta_rule.limits(run)
    for row in run.rows("calls"):
        if (share := share_of_best(row)) is not None:
            what = f"{call_name(row)}, times the fastest other library"
            yield Criterion(what, share, 1, True)
    for row in run.rows("packed"):
        share = over_long(run, row)
        if share is not None:
            heads = "{heads} heads of {width}".format(**row.of)
            what = f"{row.of['sequences']} sequences, {heads}, time per token over one long one's"
            yield Criterion(what, share, PACKED_SHARE)
