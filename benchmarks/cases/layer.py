"""The layer's speed in the validator's loop: the public fork, the baseline and this project.

    python -m benchmarks layer --fork PATH --tree public-fork baseline overlay-ops overlay \
        --out benchmarks/h200/{}.json

PATH is a checkout of the public fork (https://github.com/troy12x/flash-linear-attention); without
it, this project's layer is timed over the installed fla. `{}` in the file's name stands for the
tree. Trees of this project are first checked for correctness, at several lengths in parallel. Then
all trees are timed in fresh processes, one at a time; this project's layer is timed only at lengths
that fit into the GPU's memory. The other trees are timed without a check: the fork does not compute
the recurrence, and the baseline misses a limit of the check with correlated keys.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.cases.trees import TREES, Tree, make_tree
from benchmarks.engine.commands import fork_option, progress
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
"""The same with the fork's own layer, if only the operator is published."""
PEAK_BYTES = {1_000_000: 10e9}
"""Most memory in that loop, so that a million tokens fit into a card of 24 GB."""
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
    """Return the check of `length` or the next longer one, else of the longest; None without any.

    Raises:
        MeasurementError: the check failed, or returned no result.
    """
    if not checks:
        return None
    result = checks[min((n for n in checks if n >= length), default=max(checks))]
    if isinstance(result, MeasurementError):
        raise result
    return require_passed(result)


class Subject(NamedTuple):
    """A tree that is timed."""

    name: str
    folder: Path
    plan: Tree
    checks: Mapping[int, Check]  # by their lengths


def time_process(subject: Subject, length: int, process: int, gpu_lock: Path, device: str) -> Entry:
    """Time one length in a fresh process; a length's first process may have empty caches."""
    name, folder, plan, checks = subject
    of = {"tokens": length, "process": process}
    cold = process == 0 and length in plan.cold
    try:
        correctness = check_of(checks, length)
        sample = timed(
            folder,
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


def time_trees(
    subjects: Sequence[Subject], gpu_lock: Path, device: str
) -> Iterator[tuple[str, list[Entry]]]:
    """Time trees at the lengths of their plans, in rounds of processes that start together.

    The processes of all trees use the GPU one after the other. If a length fails, the tree is not
    timed at it again, and its earlier entries are dropped. After each process, yield its tree and
    all entries of this tree so far.
    """
    entries: dict[str, list[Entry]] = {subject.name: [] for subject in subjects}

    def failed(name: str) -> set[Any]:
        return {entry.of["tokens"] for entry in entries[name] if entry.failure}

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(max(max(tree.plan.runs, tree.plan.short_runs) for tree in subjects)):
            due = [
                (subject, n)
                for subject in subjects
                for n in subject.plan.due(number)
                if n not in failed(subject.name)
            ]
            run = partial(time_process, process=number, gpu_lock=gpu_lock, device=device)
            for entry in pool.map(run, [subject for subject, _ in due], [n for _, n in due]):
                name = str(entry.by)
                entries[name].append(entry)
                kept = (x for x in entries[name] if x.failure or x.of["tokens"] not in failed(name))
                yield name, sorted(kept, key=lambda x: (x.of["tokens"], x.of["process"]))


def options(parser: argparse.ArgumentParser) -> None:
    fork_option(parser, required=False)
    parser.add_argument("--tree", choices=TREES, nargs="+", default=["overlay"])


def measure_trees(names: Sequence[str], fork: Path | None) -> Iterator[tuple[str, list[Entry]]]:
    """Check trees at their lengths in parallel, then time them; yield as `time_trees` does."""
    machine = probe()
    device = machine.device
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        subjects = []
        for name in names:
            plan = TREES[name]
            if plan.has_layer and machine.gpu_memory_mb is not None:
                memory, capability = machine.gpu_memory_mb / 1024, machine.compute_capability
                plan = plan.fitting(partial(fits, memory_gib=memory, capability=capability))
            subjects.append(Subject(name, make_tree(fork, Path(folder, name), plan), plan, {}))
        due = [(subject.folder, n) for subject in subjects for n in subject.plan.checks]
        run = partial(check_length, device=device)
        results = pool.map(run, [folder for folder, _ in due], [n for _, n in due])
        checks = dict(zip(due, results, strict=True))
        subjects = [
            subject._replace(checks={n: checks[subject.folder, n] for n in subject.plan.checks})
            for subject in subjects
        ]
        yield from time_trees(subjects, Path(folder, "gpu-lock"), device)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    machine = probe()
    run = start("layer", WORKLOAD.describe(machine.device), args.commit, device=None)
    run = run.model_copy(update={"environment": machine})
    for name, entries in measure_trees(args.tree, args.fork):
        yield run.adding(*entries, tree=name)


def file_of(run: Run, out: Path) -> Path:
    """Return the file of a tree's run: `{}` in the name `out` stands for the tree."""
    return out.with_name(out.name.format(run.settings["tree"]))


def by_length(run: Run) -> dict[int, list[Entry]]:
    """Return the timed processes of each length, shortest first."""
    by_length: dict[int, list[Entry]] = {}
    for entry in sorted(run.table("processes"), key=lambda entry: int(entry.of["tokens"])):
        if not entry.failure:
            by_length.setdefault(int(entry.of["tokens"]), []).append(entry)
    return by_length


def tree_limits(layer: Run, ops: Run) -> Iterator[Criterion]:
    """Yield every limit of both of this project's trees with its figure."""
    for run, scope, least in ((layer, "layer", SPEED), (ops, "ops", OPS_SPEED)):
        for tokens, limit in least.items():
            speed = median(entry.figures["tokens_per_sec"] for entry in by_length(run)[tokens])
            what = f"{tokens:,} tokens, `{scope}` scope, M tokens/s"
            yield Criterion(what, speed, limit, True, 1e-6)
    lengths = by_length(layer)
    for tokens, limit in QUIET_SPEED.items():
        fastest = max(entry.figures["tokens_per_sec"] for entry in lengths[tokens])
        what = f"{tokens:,} tokens, `layer` scope, fastest process, M tokens/s"
        yield Criterion(what, fastest, limit, True, 1e-6)
    for tokens, most in PEAK_BYTES.items():
        peak = max(entry.figures["vram_mb"] for entry in lengths[tokens]) * 2**20
        yield Criterion(f"{tokens:,} tokens, peak memory, GB", peak, most, False, 1e-9)
    every = [entry for processes in lengths.values() for entry in processes]
    cold = [x.figures["first_call_seconds"] for x in every if x.texts["cache"] == "cold"]
    what = "slowest first call with empty caches, s"
    yield Criterion(what, max(cold), FIRST_CALL_SECONDS)
