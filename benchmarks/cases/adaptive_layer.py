"""Training steps of the adaptive layer on this GPU, and of the same layer made of fla's modules.

    python -m benchmarks adaptive_layer --out benchmarks/h200/adaptive-layer.json

`ours` is `AdaptiveQuasarAttention`, and is first checked against float64. The baseline computes the
same formula with fla's modules and fla's `chunk_delta_rule`. Each runs in a fresh process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases.layer_calls import (
    DEVICE,
    gradient_errors,
    inputs,
    output,
    shape_label,
    step,
)
from benchmarks.engine import clocks, processes, tuning
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Row, Run, start
from quasar_kernels.adaptive_reference import adaptive_layer_reference
from quasar_kernels.delta_reference import delta_chunked
from quasar_kernels.mount import mount
from quasar_kernels.reference import relative_rms


class Shape(NamedTuple):
    """A layer and its input; with `sequences`, the tokens are packed sequences of one row."""

    hidden_size: int
    heads: int
    head_dim: int
    batch: int
    tokens: int
    sequences: int = 1

    def label(self) -> str:
        return shape_label(*self[:5]) + f", packed in {self.sequences}" * (self.sequences > 1)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return an input and the gradient of the output."""
        return inputs(self.batch, self.tokens, self.hidden_size)

    def bounds(self) -> Tensor | None:
        """Return the bounds of packed sequences of unequal lengths, on the GPU."""
        if self.sequences == 1:
            return None
        cuts = torch.arange(self.sequences + 1, dtype=torch.float64) / self.sequences
        return (cuts**1.5 * self.tokens).round().long().to(DEVICE)


MODEL = Shape(1536, 12, 128, 1, 16_384)
SHAPES = (
    MODEL,
    MODEL._replace(batch=4, tokens=4096),
    MODEL._replace(sequences=8),
    Shape(4096, 32, 128, 1, 8192),
)
STEP_MS, FORWARD_MS, FIRST_SECONDS = 3.6, 1.2, 5.0
LEADS = {MODEL: 3.0, SHAPES[-1]: 2.0}
"""Least speed-up of a step over the baseline."""
APART = 1.1
"""Longest step with batched or packed tokens, relative to one with a single sequence."""
OUTPUT_ERROR, GRADIENT_ERROR, FP32_ERROR = 8e-3, 1.5e-2, 1e-5
CHECKED_TOKENS = 3000
CALLS, WARM = 50, 10

PROTOCOL = f"""\
Under bf16 autocast, with fp32 input and parameters. Times are medians of {CALLS} calls after \
{WARM}, by the host's clock, with a synchronization after each call. A step is the forward and \
backward pass with gradients of the input and of all parameters; a forward pass records nothing. \
Memory is the peak of a step beyond parameters and input, without the memory that CUDA graphs \
share. All calls of a shape have the same input and bounds, so ours replays graphs from the third \
on. The first step runs in a new process with empty caches, after the imports. fla's kernels are \
tuned by 20 ms for each candidate."""


class Baseline(nn.Module):
    """The adaptive layer's formula with fla's modules and delta rule."""

    def __init__(self, hidden_size: int, head_dim: int, heads: int, eps: float = 1e-5) -> None:
        from fla.modules import FusedRMSNormGated, ShortConvolution

        super().__init__()
        width = heads * head_dim
        self.heads, self.head_dim = heads, head_dim
        for name in ("q", "k", "v"):
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, width, bias=False))
            conv = ShortConvolution(hidden_size=width, kernel_size=4, activation="silu")
            self.add_module(f"{name}_conv1d", conv)
        self.b_proj = nn.Linear(hidden_size, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, head_dim, bias=False), nn.Linear(head_dim, width)
        )
        self.o_norm = FusedRMSNormGated(head_dim, eps=eps, activation="sigmoid")
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        cos: Any = None,
        sin: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        from fla.ops.delta_rule import chunk_delta_rule

        shape = (*x.shape[:2], self.heads, self.head_dim)

        def project(name: str) -> Tensor:
            rows = getattr(self, f"{name}_proj")(x)
            y: Tensor = getattr(self, f"{name}_conv1d")(x=rows, cu_seqlens=cu_seqlens)[0]
            return y.view(shape)

        def rotated(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return x.mul(cos) + torch.cat([-second, first], dim=-1).mul(sin)

        q, k, v = map(project, ("q", "k", "v"))
        if cos is not None:
            cos, sin = (table.transpose(1, 2) for table in (cos, sin))  # [1, T, 1, S]
            q, k = rotated(q), rotated(k)
        q, k = (F.normalize(t, dim=-1).to(v.dtype) for t in (q, k))
        u = self.b_proj(x).sigmoid().float()[..., None] + self.dt_bias.view(shape[2:])
        lost = 1 - torch.exp(-torch.exp(self.A_log)[:, None] * F.softplus(u))
        square = k.float().square().sum(-1).clamp(0.1, 10) + 1e-6
        step = (lost.mean(-1) / square).to(v.dtype)
        o, _ = chunk_delta_rule(q, k, v, step, cu_seqlens=cu_seqlens)
        return self.o_proj(self.o_norm(o, self.g_proj(x).view(shape)).flatten(2)), None


def new(by: str, shape: Shape) -> Any:
    mount()
    from fla.layers.quasar_adaptive import AdaptiveQuasarAttention

    torch.manual_seed(0)
    layer = AdaptiveQuasarAttention if by == "ours" else Baseline
    return layer(shape.hidden_size, shape.head_dim, shape.heads).to(DEVICE)


def costs(by: str) -> Iterator[Entry]:
    if by == "baseline":
        tuning.tune_quickly()
    clocks.soak(1)
    for shape in SHAPES:
        layer, (x, dy), bounds = new(by, shape), shape.inputs(), shape.bounds()
        train = partial(step, layer, x, dy, cu_seqlens=bounds)
        train()  # compiles
        step_ms = clocks.single_ms(train, CALLS, WARM).wall
        figures = {"step_ms": step_ms, "peak_bytes": clocks.peak_bytes(train)}
        with torch.no_grad():
            forward = partial(output, layer, x, cu_seqlens=bounds)
            figures["forward_ms"] = clocks.single_ms(forward, CALLS, WARM).wall
        yield Entry(table="steps", of=shape._asdict(), by=by, figures=figures)
        del layer, x, dy, train
        clocks.free()


def compile_baseline(shape: Shape) -> None:
    """Fill Triton's cache with all candidates of fla's kernels."""
    tuning.tune_quickly()
    step(new("baseline", shape), *shape.inputs(), cu_seqlens=shape.bounds())
    torch.cuda.synchronize()


def first_step() -> Entry:
    train = partial(step, new("ours", MODEL), *MODEL.inputs())
    seconds = clocks.single_ms(train, 1, 0).wall / 1e3
    return Entry(table="first", of=MODEL._asdict(), by="ours", figures={"seconds": seconds})


def errors(dtype: torch.dtype) -> Entry:
    """Compare the output and all gradients of a few tokens with float64."""
    shape = MODEL._replace(tokens=CHECKED_TOKENS)
    layer, (x, dy) = new("ours", shape), shape.inputs()
    with torch.no_grad():
        layer.dt_bias.normal_()
    autocast, name = dtype == torch.bfloat16, str(dtype).removeprefix("torch.")

    def exact(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return adaptive_layer_reference(
            dict(weights), x, shape.head_dim, layer.norm_eps, operator=delta_chunked
        )

    clocks.poison()
    worst = gradient_errors(layer, x, dy, exact, autocast=autocast)
    with torch.no_grad():
        y = output(layer, x, autocast=autocast)
        wide = {n: p.double() for n, p in layer.named_parameters()}
        worst["y"] = relative_rms(y, exact(wide, x.double()))
    return Entry(table="errors", of={"dtype": name}, by="ours", errors=worst)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    run: Run = processes.call(start, "adaptive_layer", PROTOCOL, args.commit)
    with tempfile.TemporaryDirectory() as folder:
        names = "TRITON_CACHE_DIR", "QUASAR_CACHE_DIR", "CUDA_CACHE_PATH"  # the last is NVRTC's
        caches = dict.fromkeys(names, folder)
        entries = [processes.call(first_step, environ=caches)]
    with ThreadPoolExecutor() as pool:  # nothing of this is timed
        whole = [shape for shape in SHAPES if shape.batch == 1]
        tuned = [pool.submit(processes.call, compile_baseline, shape) for shape in whole]
        entries += pool.map(partial(processes.call, errors), (torch.bfloat16, torch.float32))
        wait(tuned)
    rest = (processes.stream(costs, by) for by in ("ours", "baseline"))
    yield from run.growing(chain(entries, *rest))


def limits(run: Run) -> Iterator[Criterion]:
    rows = {Shape(**row.of): row for row in run.rows("steps")}

    def ms(row: Row | None, name: str) -> float:
        return float((row and row.figure("ours", name)) or float("nan"))

    model = ms(rows.get(MODEL), "step_ms")
    yield Criterion(f"training step, {MODEL.label()}, ms", model, STEP_MS)
    forward = ms(rows.get(MODEL), "forward_ms")
    yield Criterion(f"forward pass, {MODEL.label()}, ms", forward, FORWARD_MS)
    for shape in SHAPES[1:3]:
        what = f"training step, {shape.label()}, relative to one sequence"
        yield Criterion(what, ms(rows.get(shape), "step_ms") / model, APART)
    for shape, row in rows.items():
        if "baseline" not in row.by:
            continue
        label = f"training step, {shape.label()}"
        most = float(row.figure("baseline", "peak_bytes") or 0)
        yield Criterion(f"{label}, memory, MB", ms(row, "peak_bytes"), most, scale=1e-6)
        if shape in LEADS:
            ratio = row.ratio("step_ms", "baseline", "ours") or 0
            what = f"{label}, times the baseline's speed"
            yield Criterion(what, ratio, LEADS[shape], True)
    for entry in run.table("errors"):
        half = entry.of["dtype"] == "bfloat16"
        for name, limit in (("output", OUTPUT_ERROR), ("gradient", GRADIENT_ERROR)):
            chosen = [e for n, e in entry.errors.items() if (n == "y") == (name == "output")]
            what = f"{entry.of['dtype']}, worst {name}, relative RMS"
            yield Criterion(what, max(chosen), limit if half else FP32_ERROR)
    for entry in run.table("first"):
        yield Criterion("first step, s", entry.figures["seconds"], FIRST_SECONDS)
