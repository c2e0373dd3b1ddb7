"""The layer's speed in the validator's loop: the public fork, the baseline and this project.

    python -m benchmarks layer --fork PATH --tree overlay --out benchmarks/h200/overlay.json

PATH is a checkout of the public fork (https://github.com/troy12x/flash-linear-attention); without
it, this project's layer is timed over the installed fla. Trees of this project are first checked
for correctness, at several lengths in parallel. Then the tree is timed in fresh processes, one at a
time; this project's layer is timed only at lengths that fit into the GPU's memory. The other trees
are timed without a check: the fork does not compute the recurrence, and the baseline misses a limit
of the check with correlated keys.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.cases import trees
from benchmarks.cases.trees import TREES, Tree, make_tree
from benchmarks.engine.commands import progress
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Run, start
from harness.hardware.gpus import fits
from harness.measuring import runner
from harness.measuring.runner import (
    MeasurementError,
    Options,
    check,
    confirm,
    probe,
    require_passed,
)
from harness.sample import Correctness
from harness.workload import WORKLOAD

timed = runner.measure
"""Function that times one process; tests replace it."""
AT_ONCE = 10
"""Processes that start in parallel; an import of the fork takes ten seconds of one core."""

SPEED = {512: 2.5e6, 2048: 8e6, 16_384: 40e6, 100_000: 105e6, 1_000_000: 140e6}
"""Least tokens/s in the validator's loop, by tokens, with the layer published."""
QUIET_SPEED = {512: 7e6, 1024: 12e6, 2048: 24e6}
"""The same on an idle host, for which the fastest of the processes counts."""
OPS_SPEED = {1_000_000: 70e6}
"""The same if only the operator is published, under the fork's own layer."""
PEAK_BYTES = {1_000_000: 10e9}
"""Most memory in that loop: a card of 24 GB then reaches a million tokens."""
FIRST_CALL_SECONDS = 10.0
"""Longest first call of a fresh process with empty kernel caches, at every length."""

Check = Correctness | MeasurementError


def check_length(tree: Path, length: int, device: str) -> Check:
    try:
        result = check(tree, length, Options(device))
    except MeasurementError as error:
        progress(f"check at {length}: {error.kind}: {error.reason}")
        return error
    failed = "; ".join(map(str, result.failed))
    progress(f"check at {length}, {result.seconds:.1f} s: {failed or 'passed'}")
    return result


def check_of(checks: Mapping[int, Check], length: int) -> Correctness | None:
    """Return the check of the next length, or of the longest; None if there are no checks.

    Raises:
        MeasurementError: the check failed, or returned no result.
    """
    if not checks:
        return None
    result = checks[min((n for n in checks if n >= length), default=max(checks))]
    if isinstance(result, MeasurementError):
        raise result
    return require_passed(result)


def time_process(
    tree: Path,
    name: str,
    length: int,
    process: int,
    plan: Tree,
    checks: Mapping[int, Check],
    gpu_lock: Path,
    device: str,
) -> Entry:
    """Time one length in a fresh process; the first one of a length may have empty caches."""
    of = {"tokens": length, "process": process}
    cold = process == 0 and length in plan.cold
    try:
        correctness = check_of(checks, length)
        sample = timed(
            tree,
            length,
            Options(device),
            cross_check=correctness is not None,
            cold_cache=cold,
            gpu_lock=gpu_lock,
        )
        sample = sample if correctness is None else confirm(sample, correctness)
    except MeasurementError as error:
        progress(f"{name}, {length} tokens: {error.kind}: {error.reason}\n{error.log_tail[-2000:]}")
        return Entry(table="processes", of=of, by=name, failure=f"{error.kind}: {error.reason}")
    progress(f"{name}, {length} tokens: {sample.tokens_per_sec / 1e6:.3f} M tokens/s")
    names = ("tokens_per_sec", "vram_mb", "elapsed_seconds", "first_call_seconds", "import_seconds")
    checked = {} if correctness is None else {"checked_tokens": correctness.longest}
    figures = {name: getattr(sample, name) for name in names} | checked
    return Entry(table="processes", of=of, by=name, figures=figures, texts={"cache": sample.cache})


def time_tree(
    name: str,
    tree: Path,
    plan: Tree,
    checks: Mapping[int, Check],
    gpu_lock: Path,
    device: str,
) -> list[Entry]:
    """Time a tree at the lengths of its plan, in rounds of processes that start together.

    A length that fails once is excluded from the next rounds, with its earlier processes.
    """
    entries: list[Entry] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(max(plan.runs, plan.short_runs)):
            failed = {entry.of["tokens"] for entry in entries if entry.failure}
            due = [n for n in plan.due(number) if n not in failed]
            run = partial(
                time_process,
                tree,
                name,
                process=number,
                plan=plan,
                checks=checks,
                gpu_lock=gpu_lock,
                device=device,
            )
            entries += pool.map(run, due)
    failed = {entry.of["tokens"] for entry in entries if entry.failure}
    kept = [one for one in entries if one.failure or one.of["tokens"] not in failed]
    return sorted(kept, key=lambda one: (one.of["tokens"], one.of["process"]))


options = trees.options


def measure_tree(name: str, fork: Path | None) -> list[Entry]:
    """Check a tree at its lengths in parallel, then time it."""
    machine, plan = probe(), TREES[name]
    device = machine.device
    if plan.has_layer and machine.gpu_memory_mb is not None:
        memory, capability = machine.gpu_memory_mb / 1024, machine.compute_capability
        plan = plan.fitting(lambda n: fits(n, memory, capability))
    with tempfile.TemporaryDirectory() as folder:
        tree = make_tree(fork, Path(folder, name), plan)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = pool.map(lambda n: check_length(tree, n, device), plan.checks)
            checks = dict(zip(plan.checks, results, strict=True))
        return time_tree(name, tree, plan, checks, Path(folder, "gpu-lock"), device)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    machine = probe()
    entries = measure_tree(args.tree, args.fork)
    run = start("layer", WORKLOAD.describe(machine.device), args.commit, device=None)
    yield run.model_copy(update={"environment": machine}).adding(*entries, tree=args.tree)


def by_length(run: Run) -> dict[int, list[Entry]]:
    """Return the timed processes of each length, shortest first."""
    by_length: dict[int, list[Entry]] = {}
    for entry in sorted(run.table("processes"), key=lambda one: int(one.of["tokens"])):
        if not entry.failure:
            by_length.setdefault(int(entry.of["tokens"]), []).append(entry)
    return by_length


def tree_limits(layer: Run, ops: Run) -> Iterator[Criterion]:
    """Yield every limit of both of this project's trees with its figure."""
    for run, scope, least in ((layer, "layer", SPEED), (ops, "ops", OPS_SPEED)):
        for tokens, limit in least.items():
            speed = median(one.figures["tokens_per_sec"] for one in by_length(run)[tokens])
            what = f"{tokens:,} tokens, `{scope}` scope, M tokens/s"
            yield Criterion(what, speed, limit, True, 1e-6, ".1f")
    lengths = by_length(layer)
    for tokens, limit in QUIET_SPEED.items():
        fastest = max(one.figures["tokens_per_sec"] for one in lengths[tokens])
        what = f"{tokens:,} tokens, `layer` scope, fastest process, M tokens/s"
        yield Criterion(what, fastest, limit, True, 1e-6, ".1f")
    for tokens, most in PEAK_BYTES.items():
        peak = max(one.figures["vram_mb"] for one in lengths[tokens]) * 2**20
        yield Criterion(f"{tokens:,} tokens, peak memory, GB", peak, most, False, 1e-9, ".2f")
    every = [one for processes in lengths.values() for one in processes]
    cold = [one.figures["first_call_seconds"] for one in every if one.texts["cache"] == "cold"]
    what = "slowest first call with empty caches, s"
    yield Criterion(what, max(cold), FIRST_CALL_SECONDS, digits=".1f")
