"""Speed, memory, errors, causality and gradients of any forks and of this project's layer.

    python -m benchmarks rivals COMMIT=TREE ... --out benchmarks/h200/rivals.json

TREE is a folder that holds a fork's `fla`; the name before it, for example its commit, is the name
of its rows. This project's layer is measured in the same run, over the public fork with --fork
PATH, otherwise over the installed fla. Workers import in parallel and are timed one after another;
errors are computed afterwards, in parallel. If a process crashes, replaces the clock or exceeds
--seconds, its row has the reason. The code of every tree runs with your rights.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.layer import AT_ONCE
from benchmarks.cases.layer_calls import exact
from benchmarks.cases.trees import TREES, make_tree
from benchmarks.engine import commands, processes
from benchmarks.engine.inputs import layer_like
from benchmarks.engine.results import Entry, Run, start
from harness.measuring.runner import MeasurementError, Options, probe
from harness.measuring.runner import measure as timed
from harness.terminal import one_line
from harness.worker.chain import drawn
from harness.worker.compare import figures
from harness.worker.own_layer import draw_weights
from harness.worker.subject.serve import OPERANDS, InProcessSubject
from harness.worker.subject.tree import load_tree
from harness.workload import WORKLOAD, parse_lengths
from quasar_kernels.reference import quasar_chunked, relative_rms

OURS, TARGET = "this project", 1_000_000
HEADS = (WORKLOAD.num_heads, WORKLOAD.head_dim)
Results = dict[str, Any]
"""Fields of an entry."""

PROTOCOL = """\
Speed and memory: {loop} The loop is the public one, which trusts the fork's process. Errors: \
relative RMS against the float64 recurrence, of the operator on inputs like a layer's, and of the \
layer with its own random weights. Causality: earlier tokens with another output after the input \
changed from the last token of the first half on. Gradients: of a random sum of the layer's \
outputs, against float64 autograd; a weight counts as without gradient if all its elements are \
zero or missing."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trees", nargs="+", type=_named, metavar="NAME=TREE")
    parser.add_argument("--lengths", type=parse_lengths, default=(TARGET,))
    parser.add_argument("--checked", type=int, default=16_384, help="tokens of outputs' errors")
    parser.add_argument("--trained", type=int, default=1024, help="tokens of gradients' errors")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of a process")
    commands.fork_option(parser, required=False)


def _named(text: str) -> tuple[str, Path]:
    name, _, tree = text.partition("=")
    if not (name and Path(tree, "fla").is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=TREE with a folder TREE/fla")
    if name == OURS:
        raise argparse.ArgumentTypeError(f"{OURS!r} is measured in any case")
    return name, Path(tree).resolve()


def measure(args: argparse.Namespace) -> Iterator[Run]:
    machine = probe()
    protocol = PROTOCOL.format(loop=WORKLOAD.describe(machine.device))
    run = start("rivals", protocol, args.commit, device=None)
    run = run.model_copy(update={"environment": machine})
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name).resolve()
        ours = make_tree(args.fork, folder / "ours", TREES["overlay"])
        trees = {OURS: ours, **dict(args.trees)}
        settings = Options(machine.device, args.seconds)
        jobs = [(length, by) for length in args.lengths for by in trees]
        time_one = partial(time_tree, options=settings, gpu_lock=folder / "gpu-lock")
        for entry in pool.map(lambda job: time_one(job[1], trees[job[1]], job[0]), jobs):
            run = run.adding(entry)
            yield run
        check = partial(check_tree, args=args, device=machine.device)
        for entries in pool.map(lambda item: list(check(*item)), trees.items()):
            run = run.adding(*entries)
            yield run


def time_tree(by: str, tree: Path, length: int, *, options: Options, gpu_lock: Path) -> Entry:
    """Time a tree in the validator's loop, in a fresh process, without a check of its results."""
    of = {"tokens": length}
    try:
        sample = timed(tree, length, options, cross_check=False, gpu_lock=gpu_lock)
    except MeasurementError as error:
        return Entry(table="speed", of=of, by=by, failure=f"{error.kind}: {error.reason}")
    found = {name: getattr(sample, name) for name in ("tokens_per_sec", "vram_mb")}
    return Entry(table="speed", of=of, by=by, figures=found)


def check_tree(by: str, tree: Path, args: argparse.Namespace, device: str) -> Iterator[Entry]:
    """Yield an entry for each of `CHECKS`, all computed in one fresh process.

    If the process fails, the last entry has the reason.
    """
    entries = processes.stream(_checks, by, tree, args, device, seconds=args.seconds)
    try:
        yield from entries
    except processes.ProcessFailed as error:
        yield Entry(table="checks", of={"what": "process"}, by=by, failure=str(error))


def _checks(by: str, tree: Path, args: argparse.Namespace, device: str) -> Iterator[Entry]:
    loaded, place = load_tree(tree), torch.device(device)
    if place.type == "cpu":
        torch.set_num_threads(1)  # several processes compute at the same time
    subject = InProcessSubject(loaded.operator, loaded.layer_class, place)
    for what, check in CHECKS.items():
        tokens = args.trained if check is _gradients else args.checked
        entry = partial(Entry, table="checks", of={"what": what, "tokens": tokens}, by=by)
        try:
            yield entry(**check(subject, tokens, place))
        except Exception as error:  # the code under test may raise anything
            yield entry(failure=one_line(f"{type(error).__name__}: {error}")[:300])


def _operator(subject: InProcessSubject, tokens: int, device: torch.device) -> Results:
    inputs = layer_like(tokens, device=device.type)
    subject.put(dict(zip(OPERANDS, inputs, strict=True)))
    return _errors(subject.operate()["o"], quasar_chunked(*inputs, chunk=256)[0])


def _layer(subject: InProcessSubject, tokens: int, device: torch.device) -> Results:
    weights, x = _public(subject.build()), _draw(subject, tokens, device)
    return _errors(subject.forward()["y"], exact(weights, x, *HEADS))


def _causality(subject: InProcessSubject, tokens: int, device: torch.device) -> Results:
    subject.build()
    x, cut = _draw(subject, tokens, device), tokens // 2 - 1
    first, again = (subject.forward()["y"].clone() for _ in range(2))
    x[:, cut:] = torch.randn_like(x[:, cut:])
    subject.put({"x": x})
    after = subject.forward()["y"]
    changed = (first != after) & (first == again)  # outputs of two equal calls may differ
    return {"figures": {"seeing": int(changed[:, :cut].any(-1).sum())}}


def _gradients(subject: InProcessSubject, tokens: int, device: torch.device) -> Results:
    weights, x = subject.build(), torch.randn(1, tokens, WORKLOAD.hidden_size, device=device)
    toward = torch.randn_like(x)
    subject.put({"x": x, "toward": toward})
    found = subject.gradients()
    without = [name for name in weights if name not in found or not found[name].any()]
    results: Results = {
        "figures": {"weights": len(weights), "without": len(without)},
        "texts": {"named": ", ".join(without)},
    }
    if _missing(weights):
        return results
    wide = {n: w.detach().double().requires_grad_() for n, w in {**weights, "input": x}.items()}
    y = exact(wide, wide["input"], *HEADS)
    torch.autograd.backward((y * toward.double()).sum())
    errors = {
        n: relative_rms(found[n], w.grad) if n in found and w.grad is not None else 1.0
        for n, w in wide.items()
    }
    return {**results, "errors": _finite(errors)}


CHECKS: dict[str, Callable[[InProcessSubject, int, torch.device], Results]] = {
    "operator": _operator,
    "layer": _layer,
    "causality": _causality,
    "gradients": _gradients,
}
"""What is checked; each function returns fields of an entry."""


def _draw(subject: InProcessSubject, tokens: int, device: torch.device) -> torch.Tensor:
    shape = (1, tokens, WORKLOAD.hidden_size)
    subject.draw("x", shape, 0)
    return drawn(shape, 0, device)


def _missing(weights: Mapping[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name, value in draw_weights(torch.device("cpu")).items()
        if name not in weights or weights[name].shape != value.shape
    ]


def _public(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the weights; raise a ValueError if the public layer has others."""
    if missing := _missing(weights):
        raise ValueError(f"the layer lacks the public layer's {', '.join(missing)}")
    return weights


def _errors(actual: torch.Tensor, expected: torch.Tensor) -> Results:
    if actual.shape != expected.shape:
        raise ValueError(f"the output has the shape {tuple(actual.shape)}")
    found = figures(actual, expected)
    errors = _finite({"relative RMS": found.relative_rms})
    return {"errors": errors, "figures": {"cosine": found.cosine}}


def _finite(errors: dict[str, float]) -> dict[str, float]:
    wrong = [name for name, error in errors.items() if not math.isfinite(error)]
    if wrong:
        raise ValueError(f"values that are not finite: {', '.join(wrong)}")
    return errors
