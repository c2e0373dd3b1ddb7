"""The delta rule, with a decay and without: this project's functions, fla's and other libraries'.

    python -m benchmarks delta_rule --out benchmarks/h200/delta-rule.json

The case times the forward pass, forward and backward, and decoding, and compares outputs and
gradients with float64. `cuda` and `triton` are quasar_kernels.delta_rule with QUASAR_BACKEND of
that name; `fla` is fla's function of that name. FlashQLA (flash-qla 0.1) and FlashInfer
(flashinfer-python 0.7) support only the gated delta rule with heads of 128. They are measured if
they are installed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module, metadata
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.delta_rule_libraries import LIBRARIES, versions
from benchmarks.engine import clocks, comparison
from benchmarks.engine.comparison import CHECKED, WAYS, Comparison, Function, Inputs, Shape, Way
from benchmarks.engine.limits import COPY_SHARE, GRADIENT_ERROR, OUTPUT_ERROR, Criterion
from benchmarks.engine.results import Entry, Row, Run, start
from quasar_kernels.delta_reference import delta_chunked
from quasar_kernels.mount import mount

Rule = Literal["delta rule", "gated delta rule"]
RULES: tuple[Rule, ...] = get_args(Rule)
PLAIN, GATED = RULES

LONG, MIDDLE = Shape(1, 1_000_000, 8, 64), Shape(1, 16_384, 8, 64)
BATCHED, WIDE = Shape(32, 2048, 8, 64), Shape(1, 65_536, 8, 128)
WIDE_BATCHED = Shape(32, 8192, 32, 128)
SHAPES = (MIDDLE, LONG, BATCHED, WIDE, WIDE_BATCHED)
CALLS = [(rule, way, shape) for way in WAYS for shape in SHAPES for rule in RULES]
"""All calls, in the order in which a run measures them."""
BATCHES, WIDTHS, HEADS = (1, 64), (64, 128), 8
CHECKED_TOKENS = 4096
"""Tokens over which gradients are compared, because float64 autograd keeps all tensors."""

OURS, FLA = ("triton", "cuda"), "fla"
LIBRARY_WIDTH = 128
"""Head size that the other libraries support."""

LEADS: dict[tuple[Rule, Way, Shape], float] = {
    (PLAIN, "forward", LONG): 15,
    (PLAIN, "forward and backward", LONG): 5,
    (PLAIN, "forward", MIDDLE): 3,
    (PLAIN, "forward and backward", MIDDLE): 3,
    (PLAIN, "forward", BATCHED): 1,
    (PLAIN, "forward and backward", BATCHED): 1,
    (GATED, "forward", LONG): 8,
    (GATED, "forward and backward", LONG): 5,
    (GATED, "forward and backward", MIDDLE): 3,
    (GATED, "forward and backward", BATCHED): 1,
}
"""Least speed-up of CUDA over fla, by graph replay and, if both were timed so, from rest."""
BEST_SHARES: dict[tuple[Rule, Way, Shape], float] = {
    (GATED, "forward", WIDE_BATCHED): 1 / 1.5,
    (GATED, "forward and backward", WIDE): 1 / 1.5,
}
"""Least accepted speed of CUDA over that of the fastest other library, by graph replay."""
MAX_MS: dict[tuple[Rule, Way, Shape], float] = {
    (PLAIN, "forward", LONG): 1.3,
    (GATED, "forward", WIDE): 0.45,
}
"""Longest accepted time of CUDA's forward pass from rest, as a validator times a layer."""

PROTOCOL = f"""\
bf16, q and k of unit length, decays as a Gated DeltaNet layer with default weights makes them. \
fla: the function of the same name and arguments, its own even where FlashQLA is installed; \
FlashQLA, FlashInfer: their gated delta rule for heads of 128, FlashInfer's forward alone and with \
its decays' exponentials. Outputs are compared with the float64 chunk form (the first sequence of \
a batch), gradients over the first 4,096 tokens of a sequence with float64 autograd. {CHECKED} \
{clocks.CLOCKS} {clocks.RESTED} Decoding: one token, eight heads, alternating states, so that they \
are not in the L2 cache, quasar_kernels' updated in place; the copy is of such states."""


def draw(rule: Rule, shape: Shape, device: str = "cuda") -> Inputs:
    """Draw random inputs with the distribution that a Gated DeltaNet layer's default weights give.

    The log decays are -A dt with A uniform up to 16 and dt log-uniform from .001 to .1
    (arXiv 2412.06464, as in Mamba-2's initialisation).

    Returns:
        q, k of unit length and v `[B, T, H, S]` bf16; beta `[B, T, H]` fp32; and for the gated rule
        the log decays g of the same shape.
    """
    batch, tokens, heads, width = shape

    def noise() -> Tensor:
        return F.silu(torch.randn(batch, tokens, heads, width, device=device))

    q, k, v = F.normalize(noise(), dim=-1), F.normalize(noise(), dim=-1), noise()
    beta, gate = (torch.randn(batch, tokens, heads, device=device) for _ in range(2))
    A = torch.empty(heads, device=device).uniform_(0, 16)
    dt = 10 ** torch.empty(heads, device=device).uniform_(-3, -1)
    x = {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16(), "beta": beta.sigmoid()}
    return x | {"g": -A * F.softplus(gate + dt.expm1().log())} if rule == GATED else x


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator by the chunk form, in the inputs' dtype and with their scale."""
    scale, tensors = x["q"].shape[-1] ** -0.5, (x["q"], x["k"], x["v"], x["beta"], x.get("g"))
    return delta_chunked(*tensors, state, bounds, scale=scale, chunk=128)


NAMES = (*OURS, FLA, *LIBRARIES)


def supports(name: str, rule: Rule, way: Way, shape: Shape) -> bool:
    if name not in LIBRARIES:
        return True
    gated = rule == GATED and shape.width == LIBRARY_WIDTH
    return gated and (way == "forward" or LIBRARIES[name].backward)


@contextmanager
def function_of(name: str, rule: Rule, kind: str = "chunk") -> Iterator[Callable[..., Any]]:
    """Yield an implementation's function; its kernels stay selected while the context is open.

    Args:
        kind: `chunk` or `fused_recurrent`, which the other libraries lack.

    Raises:
        ImportError: the library is not installed. Its import may raise other errors too.
    """
    full_name = f"{kind}_{rule.replace(' ', '_')}"
    if name in LIBRARIES:
        yield LIBRARIES[name].make()
    elif name == FLA:
        # if FlashQLA is installed, fla calls it for heads of 128
        with patch.dict(os.environ, {"FLA_FLASH_QLA": "0"}):
            yield getattr(import_module(f"fla.ops.{rule.replace(' ', '_')}"), full_name)
    else:
        from quasar_kernels import delta_rule

        with patch.dict(os.environ, {"QUASAR_BACKEND": name}):
            yield getattr(delta_rule, full_name)


@contextmanager
def selected(rule: Rule, name: str) -> Iterator[Function]:
    """Yield an implementation's function from inputs to the output of whole sequences."""
    with function_of(name, rule) as function:
        yield lambda x: function(x["q"], x["k"], x["v"], **rest(x))[0]


def rest(x: Inputs) -> Inputs:
    return {name: x[name] for name in ("beta", "g") if name in x}


def step(name: str, function: Callable[..., Any], x: Inputs, state: Tensor) -> Tensor:
    """Decode one token; fla writes a new state, this project's functions update it in place."""
    keep = {"output_final_state": True} if name == FLA else {"inplace_state": True}
    o: Tensor = function(x["q"], x["k"], x["v"], initial_state=state, **rest(x), **keep)[0]
    return o


def comparison_of(rule: Rule, tokens: int) -> Comparison:
    checked: dict[Way, int] = {"forward": tokens, "forward and backward": CHECKED_TOKENS}
    return Comparison(partial(selected, rule), exact, checked)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    mount()
    torch.manual_seed(0)
    installed, missing = versions()
    names = [name for name in NAMES if name not in missing]
    others = {"fla-core": metadata.version("fla-core"), **installed}
    run = start("delta_rule", PROTOCOL, args.commit, versions=others).adding(
        **{f"{name} is missing": why for name, why in missing.items()}
    )
    with torch.no_grad():
        clocks.soak(2)
        run = run.adding(*decoding())
        for rule, way, shape in CALLS:
            x = draw(rule, shape)
            able = [name for name in names if supports(name, rule, way, shape)]
            rested = {"cuda", *((FLA,) if shape == LONG else ())} if way == "forward" else set()
            entries = comparison_of(rule, shape.tokens).entries(
                {"rule": rule, "way": way, **shape._asdict()},
                way,
                x,
                torch.randn_like(x["q"]),
                able,
                rested=rested,
            )
            run = run.adding(*entries)
            del x
            clocks.free()
            yield run


def decoding() -> Iterator[Entry]:
    """Time one token by Triton, which decoding uses, and by fla."""
    for rule in RULES:
        for width in WIDTHS:
            for batch in BATCHES:
                x = draw(rule, Shape(batch, 1, HEADS, width))
                state = torch.randn(batch, HEADS, width, width, device="cuda")
                of = {"rule": rule, "batch": batch, "width": width}
                with ExitStack() as kernels:
                    steps = {}
                    for name in ("triton", FLA):
                        chosen = function_of(name, rule, "fused_recurrent")
                        steps[name] = partial(step, name, kernels.enter_context(chosen))
                    yield from comparison.decoding(of, x, state, steps, exact)


def call_name(row: Row) -> str:
    return f"{row.of['rule']}, {row.of['way']}, {comparison.shape_of(row.of)}"


def library_rows(run: Run) -> list[Row]:
    """Return the calls that other libraries support, and all of the gated rule's gradients."""
    return [
        row
        for row in run.rows("calls")
        if row.of["rule"] == GATED
        and (row.of["width"] == LIBRARY_WIDTH or row.of["way"] == "forward and backward")
    ]


def share_of_best(row: Row) -> float | None:
    """Return CUDA's speed as a share of the fastest other library's; None without both."""
    ms = {name: row.figure(name, "graph_ms") for name in row.by}
    others = [time for name, time in ms.items() if name not in OURS and time is not None]
    cuda = ms.get("cuda")
    return min(others) / cuda if cuda and others else None


def limits(run: Run) -> Iterator[Criterion]:
    for row in run.rows("calls"):
        text, way = call_name(row), row.of["way"]
        call = (row.of["rule"], way, comparison.shape_of(row.of))
        for kind, what in (("graph_ms", ""), ("rested_ms", ", from rest")):
            lead = row.ratio(kind, FLA, "cuda")
            if call in LEADS and lead is not None:
                yield Criterion(f"{text}, times fla{what}", lead, LEADS[call], True)
        share = share_of_best(row)
        if call in BEST_SHARES and share is not None:
            what = f"{text}, times the fastest other library"
            yield Criterion(what, share, BEST_SHARES[call], True)
        rested = row.figure("cuda", "rested_ms")
        if call in MAX_MS and rested is not None:
            yield Criterion(f"{text}, ms from rest", rested, MAX_MS[call])
        limit = OUTPUT_ERROR if way == "forward" else GRADIENT_ERROR
        for name, entry in row.by.items():
            if name not in OURS:
                continue
            if entry.failure:
                yield Criterion(f"{text}, {name}, timed", False, True, True)
                continue
            for tensor, error in entry.errors.items():
                yield Criterion(f"{text}, error of {tensor}, {name}", error, limit)
            yield Criterion(f"{text}, {name}, same bits", entry.figures["repeats"], True, True)
    tokens = run.rows("decoding")
    for row in tokens:
        text = "{rule}, decoding, B = {batch}, heads of {width}".format(**row.of)
        if (lead := row.ratio("graph_ms", FLA, "triton")) is not None:
            yield Criterion(f"{text}, times fla", lead, 1, True)
        share = row.ratio("graph_ms", "copy", "triton")
        if share is not None and row.of["batch"] == max(one.of["batch"] for one in tokens):
            yield Criterion(f"{text}, share of copy bandwidth", share, COPY_SHARE, True)
