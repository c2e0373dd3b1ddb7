"""The layer's errors on this GPU, at lengths beyond those of the tests.

    python -m benchmarks layer_accuracy --fork PATH --out benchmarks/h200/layer-accuracy.json

PATH is a checkout of the public fork. The case compares outputs and gradients with the float64
layer, checks decoding, exchanges weights with the public layer, and runs sequences of 5 and 10
million tokens. It needs 50 GB of GPU memory.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.layer_calls import DEVICE, exact, gradient_errors, inputs, output
from benchmarks.cases.trees import TREES, make_tree
from benchmarks.engine import commands, processes
from benchmarks.engine.clocks import free, single_ms
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Run, start
from harness.worker.compare import figures
from harness.worker.subject.timing import recording, time_layer
from harness.worker.subject.tree import load_tree
from harness.workload import WORKLOAD
from quasar_kernels.reference import relative_rms

HEADS = (WORKLOAD.num_heads, WORKLOAD.head_dim)
LENGTHS = (1000, 65_536, 1_000_000)
GRADIENT_LENGTHS = (1024, 4096, 65_536)
EXCHANGE_TOKENS = 4096
PREFILL, DECODED = 2048, 64
LONG_TOKENS, LONGEST_TOKENS, SLICE = 5_000_000, 10_000_000, 1_000_000
TIMED_CALLS = 3

OUTPUT_ERROR, OUTPUT_COSINE, OUTPUT_DIFFERENCE = 8e-3, 0.9999, 0.1
"""Relative RMS error, cosine and largest difference of outputs against float64."""
EXCHANGE_ERROR = 1e-2
"""Limit on the relative RMS error of the public layer with this project's weights, and vice versa.
Both compute the same function, but the public layer rounds more often."""
GRADIENT_ERROR = 2e-2
"""Relative RMS error of every gradient against float64."""
LONG_RUNS = {("training", 5_000_000), ("slices", 10_000_000)}
"""Ways and lengths in tokens that must run."""


def fresh(tokens: int) -> Tensor:
    """Return an input as the validator draws it."""
    return torch.randn(WORKLOAD.batch_size, tokens, WORKLOAD.hidden_size, device=DEVICE)


def check_output(layer: Any, tokens: int) -> Entry:
    """Compare an output, and the bits of three calls: launched, captured and replayed."""
    x = fresh(tokens)
    y, *again = (output(layer, x).detach() for _ in range(3))
    equal = all(torch.equal(y, other) for other in again)
    del again
    with torch.no_grad():
        result = figures(y, exact(layer.state_dict(), x, *HEADS))
    return Entry(
        table="outputs",
        of={"tokens": tokens},
        figures={
            "cosine": result.cosine,
            "max_difference": result.max_difference,
            "reruns_equal": equal,
        },
        errors={"y": result.relative_rms, "worst eighth": result.worst_part},
    )


def check_gradients(layer: Any, tokens: int) -> Entry:
    """Compare every gradient with float64 autograd, for one random gradient of the output."""
    x, dy = inputs(WORKLOAD.batch_size, tokens, WORKLOAD.hidden_size)
    errors = gradient_errors(layer, x, dy, lambda weights, x: exact(weights, x, *HEADS))
    return Entry(table="gradients", of={"tokens": tokens}, errors=errors)


def slices(layer: Any, parts: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the layer's outputs for consecutive parts of one sequence, each from the last state."""
    cache = None
    for part in parts:
        y, _, cache = layer(part, past_key_values=cache, use_cache=True)
        yield y


@torch.no_grad()
def check_decoding(layer: Any) -> Entry:
    """Decode token by token after a prefill, and compare with one call and with float64."""
    x = fresh(PREFILL + DECODED)
    with recording(DEVICE):
        whole = layer(x)[0][:, PREFILL:]
        parts = iter(torch.split(x, [PREFILL, *[1] * DECODED], dim=1))
        tail = torch.cat(list(slices(layer, parts))[1:], dim=1)
    expected = exact(layer.state_dict(), x, *HEADS)[:, PREFILL:]
    errors = {
        "decoded": relative_rms(tail, expected),
        "one call": relative_rms(whole, expected),
        "apart": relative_rms(tail, whole),
    }
    return Entry(table="decoding", of={"prefill": PREFILL, "decoded": DECODED}, errors=errors)


def check_exchange(layer_class: type, fork: Path, folder: Path) -> Entry:
    """Exchange weights with the public layer, which runs over our operator in a fresh process.

    Both load strictly, and must then compute the same.
    """
    tree = make_tree(fork, folder / "public", TREES["overlay-ops"])
    layer, x = new(layer_class), fresh(EXCHANGE_TOKENS)
    sent, received = folder / "sent.pt", folder / "received.pt"
    torch.save({"weights": layer.state_dict(), "x": x}, sent)
    processes.call(answer_as_public, tree, sent, received)
    answer = torch.load(received, map_location=DEVICE)
    expected = exact(layer.state_dict(), x, *HEADS)
    layer.load_state_dict(answer["weights"], strict=True)
    with torch.no_grad():
        y = output(layer, x)
    errors = {
        "ours in public": relative_rms(answer["y"], expected),
        "public in ours": relative_rms(y, exact(layer.state_dict(), x, *HEADS)),
    }
    return Entry(table="exchange", of={"tokens": EXCHANGE_TOKENS}, errors=errors)


def answer_as_public(tree: Path, sent: Path, received: Path) -> None:
    """Run the public layer: save its initial weights, and its output with the weights in `sent`."""
    layer = new(load_tree(tree).layer_class)
    weights = {name: value.clone() for name, value in layer.state_dict().items()}
    message = torch.load(sent, map_location=DEVICE)
    layer.load_state_dict(message["weights"], strict=True)
    with torch.no_grad():
        y = output(layer, message["x"])
    torch.save({"weights": weights, "y": y}, received)


def long_training(layer_class: type) -> Entry:
    """Run the validator's loop on a sequence of millions, gradients recorded."""
    timing = time_layer(layer_class, LONG_TOKENS, DEVICE)
    speed = WORKLOAD.timed_calls * LONG_TOKENS / timing.elapsed_seconds
    return long_run(LONG_TOKENS, "training", speed, timing.vram_bytes)


def long_run(tokens: int, how: str, speed: float, peak: int, **errors: float) -> Entry:
    """Return the entry of a long sequence; `peak` is in bytes, input and outputs included."""
    figures = {"tokens_per_sec": speed, "peak_bytes": peak}
    of: dict[str, Any] = {"tokens": tokens, "how": how}
    return Entry(table="long runs", of=of, figures=figures, errors=errors)


def drawn_in_slices(tokens: int) -> Iterator[Tensor]:
    """Yield a sequence slice by slice, so that it is never in memory as a whole."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = WORKLOAD.batch_size, SLICE, WORKLOAD.hidden_size
    for _ in range(tokens // SLICE):
        yield torch.randn(shape, device=DEVICE, generator=generator)


@torch.no_grad()
def long_inference(layer: Any) -> Entry:
    """Run millions of tokens without gradients, in one call and in slices; compare the outputs."""
    x = torch.cat(list(drawn_in_slices(LONG_TOKENS)), dim=1)
    free()
    elapsed = single_ms(partial(output, layer, x), TIMED_CALLS, 1).wall / 1e3
    peak, y, apart = torch.cuda.max_memory_allocated(), output(layer, x), 0.0
    del x
    with recording(DEVICE):
        parts = slices(layer, drawn_in_slices(LONG_TOKENS))
        for part, one in zip(parts, torch.split(y, SLICE, dim=1), strict=True):
            apart = max(apart, relative_rms(part, one))
    return long_run(LONG_TOKENS, "no_grad", LONG_TOKENS / elapsed, peak, slices=apart)


@torch.no_grad()
def longest_inference(layer: Any) -> Entry:
    """Run a sequence only in slices."""

    def sliced() -> None:
        with recording(DEVICE):
            for _ in slices(layer, drawn_in_slices(LONGEST_TOKENS)):
                pass

    elapsed = single_ms(sliced, TIMED_CALLS, 1).wall / 1e3
    peak = torch.cuda.max_memory_allocated()
    return long_run(LONGEST_TOKENS, "slices", LONGEST_TOKENS / elapsed, peak)


def new(layer_class: type) -> Any:
    """Return a layer with default weights, as the validator builds it."""
    return layer_class(**WORKLOAD.layer_arguments()).to(DEVICE)


def checks(layer_class: type, fork: Path, folder: Path) -> Iterator[Callable[[], Entry]]:
    """Yield everything that is checked, shortest first."""
    torch.manual_seed(0)
    layer = new(layer_class)
    for tokens in LENGTHS:
        yield partial(check_output, layer, tokens)
    for tokens in GRADIENT_LENGTHS:
        yield partial(check_gradients, layer, tokens)
    yield partial(check_decoding, layer)
    yield partial(check_exchange, layer_class, fork, folder)
    yield partial(long_training, layer_class)
    yield partial(long_inference, layer)
    yield partial(longest_inference, layer)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    run = start("layer_accuracy", "", args.commit)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        loaded = load_tree(make_tree(args.fork, folder / "overlay", TREES["overlay"]))
        for check in checks(loaded.layer_class, args.fork, folder):
            free()
            run = run.adding(check())
            yield run


options = commands.fork_option


def limits(run: Run) -> Iterator[Criterion]:
    for entry in run.table("outputs"):
        where, of = f"{entry.of['tokens']:,} tokens, output against float64", entry.figures
        yield Criterion(f"{where}, relative RMS", entry.errors["y"], OUTPUT_ERROR)
        yield Criterion(f"{where}, cosine", of["cosine"], OUTPUT_COSINE, True)
        difference = of["max_difference"]
        yield Criterion(f"{where}, largest difference", difference, OUTPUT_DIFFERENCE)
    for entry in run.table("gradients"):
        worst, error = entry.worst()
        what = f"{entry.of['tokens']:,} tokens, worst gradient (`{worst}`), relative RMS"
        yield Criterion(what, error, GRADIENT_ERROR)
    yield from _behaviour(run)


def _behaviour(run: Run) -> Iterator[Criterion]:
    (decoding,), (exchange,) = run.table("decoding"), run.table("exchange")
    what = f"{decoding.of['decoded']} tokens decoded after {decoding.of['prefill']:,}"
    apart = decoding.errors["apart"]
    yield Criterion(f"{what} against one call, relative RMS", apart, OUTPUT_ERROR)
    for what, name in (
        ("public layer with our weights, loaded strictly", "ours in public"),
        ("our layer with the public one's weights, loaded strictly", "public in ours"),
    ):
        error = exchange.errors[name]
        yield Criterion(f"{what}, relative RMS", error, EXCHANGE_ERROR)
    unequal = sum(not entry.figures["reruns_equal"] for entry in run.table("outputs"))
    yield Criterion("lengths at which three calls differ in a bit", unequal, 0)
    long_runs = run.table("long runs")
    missing = LONG_RUNS - {(str(entry.of["how"]), int(entry.of["tokens"])) for entry in long_runs}
    yield Criterion("long sequences that did not run", len(missing), 0)
    for entry in long_runs:
        if "slices" in entry.errors:
            what = f"{entry.of['tokens']:,} tokens in slices against one call, relative RMS"
            yield Criterion(what, entry.errors["slices"], OUTPUT_ERROR)
