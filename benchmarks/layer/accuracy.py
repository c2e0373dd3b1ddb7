"""Check what the layer computes on this GPU, at lengths beyond a test's, and write the figures.

    python -m benchmarks.layer.accuracy --fork PATH --out benchmarks/h200/layer-accuracy.json

PATH is a checkout of the public fork. Outputs and gradients against the float64 layer, decoding,
weights exchanged with the public layer, and sequences of 5 and 10 million tokens. It holds 50 GB,
so that gates can run beside it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import commands
from benchmarks.engine.clocks import free
from benchmarks.engine.commands import say
from benchmarks.layer.calls import DEVICE, exact, gradient_errors, output
from benchmarks.layer.results import (
    Exchange,
    GradientErrors,
    LayerAccuracy,
    LayerDecoding,
    LongRun,
    OutputError,
)
from benchmarks.layer.trees import TREES, make_tree
from benchmarks.results import origin, write
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


def fresh(tokens: int) -> Tensor:
    """Return an input as the validator draws it."""
    return torch.randn(WORKLOAD.batch_size, tokens, WORKLOAD.hidden_size, device=DEVICE)


def check_output(layer: Any, tokens: int) -> OutputError:
    """Compare an output, and the bits of three calls: launched, captured and replayed."""
    x = fresh(tokens)
    y, *again = (output(layer, x).detach() for _ in range(3))
    equal = all(torch.equal(y, other) for other in again)
    del again
    with torch.no_grad():
        found = figures(y, exact(layer.state_dict(), x, *HEADS))
    return OutputError(
        tokens=tokens,
        relative_rms=found.relative_rms,
        worst_eighth=found.worst_part,
        cosine=found.cosine,
        max_difference=found.max_difference,
        reruns_equal=equal,
    )


def check_gradients(layer: Any, tokens: int) -> GradientErrors:
    """Compare every gradient with float64 autograd, for one random gradient of the output."""
    x = fresh(tokens).requires_grad_()
    errors = gradient_errors(layer, x, torch.randn_like(x).bfloat16(), *HEADS)
    return GradientErrors(tokens=tokens, errors=errors)


def slices(layer: Any, parts: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the layer's outputs for consecutive parts of one sequence, the state carried."""
    cache = None
    for part in parts:
        y, _, cache = layer(part, past_key_values=cache, use_cache=True)
        yield y


@torch.no_grad()
def check_decoding(layer: Any) -> LayerDecoding:
    """Decode token by token after a prefill, and compare with one call and with float64."""
    x = fresh(PREFILL + DECODED)
    with recording(DEVICE):
        whole = layer(x)[0][:, PREFILL:]
        parts = iter(torch.split(x, [PREFILL, *[1] * DECODED], dim=1))
        tail = torch.cat(list(slices(layer, parts))[1:], dim=1)
    expected = exact(layer.state_dict(), x, *HEADS)[:, PREFILL:]
    return LayerDecoding(
        prefill=PREFILL,
        decoded=DECODED,
        error=relative_rms(tail, expected),
        error_of_one_call=relative_rms(whole, expected),
        apart=relative_rms(tail, whole),
    )


def check_exchange(layer_class: type, fork: Path, folder: Path) -> Exchange:
    """Exchange weights with the public layer, which runs over our operator in a process of its own.

    Both load strictly, and must then compute the same.
    """
    tree = make_tree(fork, folder / "public", TREES["overlay-ops"])
    layer, x = new(layer_class), fresh(EXCHANGE_TOKENS)
    sent, received = folder / "sent.pt", folder / "received.pt"
    torch.save({"weights": layer.state_dict(), "x": x}, sent)
    command = commands.python("benchmarks.layer.accuracy", "--public", tree, sent, received)
    subprocess.run(command, check=True)
    answer = torch.load(received, map_location=DEVICE)
    theirs = exact(layer.state_dict(), x, *HEADS)
    layer.load_state_dict(answer["weights"], strict=True)
    with torch.no_grad():
        ours = output(layer, x)
    return Exchange(
        tokens=EXCHANGE_TOKENS,
        ours_in_public=relative_rms(answer["y"], theirs),
        public_in_ours=relative_rms(ours, exact(layer.state_dict(), x, *HEADS)),
    )


def answer_as_public(tree: Path, sent: Path, received: Path) -> None:
    """Run the public layer: its initial weights, and its output with the weights that were sent."""
    layer = new(load_tree(tree).layer_class)
    weights = {name: value.clone() for name, value in layer.state_dict().items()}
    message = torch.load(sent, map_location=DEVICE)
    layer.load_state_dict(message["weights"], strict=True)
    with torch.no_grad():
        y = output(layer, message["x"])
    torch.save({"weights": weights, "y": y}, received)


def long_training(layer_class: type) -> LongRun:
    """Run the validator's loop on a sequence of millions, gradients recorded."""
    timing = time_layer(layer_class, LONG_TOKENS, DEVICE)
    return LongRun(
        tokens=LONG_TOKENS,
        how="training",
        tokens_per_sec=WORKLOAD.timed_calls * LONG_TOKENS / timing.elapsed_seconds,
        peak_bytes=timing.vram_bytes,
    )


def seconds(call: Callable[[], object]) -> float:
    """Return the time of one call, after one that warms up."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(TIMED_CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / TIMED_CALLS


def drawn_in_slices(tokens: int) -> Iterator[Tensor]:
    """Yield a sequence slice by slice, so that it need not lie in memory as a whole."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = WORKLOAD.batch_size, SLICE, WORKLOAD.hidden_size
    for _ in range(tokens // SLICE):
        yield torch.randn(shape, device=DEVICE, generator=generator)


@torch.no_grad()
def long_inference(layer: Any) -> LongRun:
    """Run millions of tokens without gradients, in one call, and in slices, which must agree."""
    x = torch.cat(list(drawn_in_slices(LONG_TOKENS)), dim=1)
    free()
    elapsed = seconds(partial(output, layer, x))
    peak, y, apart = torch.cuda.max_memory_allocated(), output(layer, x), 0.0
    del x
    with recording(DEVICE):
        parts = slices(layer, drawn_in_slices(LONG_TOKENS))
        for part, one in zip(parts, torch.split(y, SLICE, dim=1), strict=True):
            apart = max(apart, relative_rms(part, one))
    return LongRun(
        tokens=LONG_TOKENS,
        how="no_grad",
        tokens_per_sec=LONG_TOKENS / elapsed,
        peak_bytes=peak,
        slices_apart=apart,
    )


@torch.no_grad()
def longest_inference(layer: Any) -> LongRun:
    """Run a sequence in slices alone."""

    def sliced() -> None:
        with recording(DEVICE):
            for _ in slices(layer, drawn_in_slices(LONGEST_TOKENS)):
                pass

    elapsed = seconds(sliced)
    return LongRun(
        tokens=LONGEST_TOKENS,
        how="slices",
        tokens_per_sec=LONGEST_TOKENS / elapsed,
        peak_bytes=torch.cuda.max_memory_allocated(),
    )


def new(layer_class: type) -> Any:
    """Return a layer with default weights, as the validator builds it."""
    return layer_class(**WORKLOAD.layer_arguments()).to(DEVICE)


def check(layer_class: type, fork: Path, folder: Path, commit: str | None) -> LayerAccuracy:
    """Check everything, shortest first."""
    torch.manual_seed(0)
    layer = new(layer_class)

    def told(run: Callable[..., Any], *args: Any) -> Any:
        free()
        found = run(*args)
        say(found)
        return found

    return LayerAccuracy(
        **origin(commit),
        outputs=tuple(told(check_output, layer, n) for n in LENGTHS),
        gradients=tuple(told(check_gradients, layer, n) for n in GRADIENT_LENGTHS),
        decoding=told(check_decoding, layer),
        exchange=told(check_exchange, layer_class, fork, folder),
        long_runs=(
            told(long_training, layer_class),
            told(long_inference, layer),
            told(longest_inference, layer),
        ),
    )


def main() -> None:
    """Check the overlay and write the file."""
    if sys.argv[1:2] == ["--public"]:  # what check_exchange starts
        answer_as_public(*map(Path, sys.argv[2:]))
        return
    args = commands.options(__doc__, fork=True).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        loaded = load_tree(make_tree(args.fork, folder / "overlay", TREES["overlay"]))
        write(args.out, check(loaded.layer_class, args.fork, folder, args.commit))


if __name__ == "__main__":
    main()
