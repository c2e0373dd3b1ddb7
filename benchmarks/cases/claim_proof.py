"""The referee's clock on this machine: agreement with a validator's loop, and its scatter.

    python -m benchmarks claim_proof --fork PATH --out FILE

PATH is a checkout of the public fork, over which this project's kernels are laid. For each length,
fresh processes time the tree in turn by the referee's clock, by validator_loop.py, and by the
referee's clock with a cheat in the layer. Then one process proves its speed many times in a row,
each time with other weights and inputs. The exit status is 1 if a limit is missed. This takes about
ten minutes on an H200.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from benchmarks.cases.claim_acceptance import validator_runs
from benchmarks.cases.trees import TREES, make_tree
from benchmarks.engine import commands, processes
from benchmarks.engine.commands import progress
from benchmarks.engine.results import Entry, Run, start
from harness.measuring import runner
from harness.measuring.runner import MeasurementError, Options, probe

FAILS = True
LENGTHS = {"cuda": (512, 16_384, 100_000, 1_000_000), "cpu": (512, 2048)}
RUNS, REPEATS = 5, 100
"""Processes of each kind at a length; most proofs in one process."""
EXACT = (16_384, 100_000, 1_000_000)
"""Lengths at which both clocks must agree within 1%."""

ROUNDED = "input kept in bf16"
"""Name of the tree with the cheat."""
CHEAT = """
_forward, _kept = QuasarAttention.forward, {}
def forward(self, hidden_states, *args, **kwargs):
    place = hidden_states.data_ptr(), hidden_states.shape
    if place not in _kept:
        _kept.clear()
        _kept[place] = hidden_states.bfloat16()
    return _forward(self, _kept[place], *args, **kwargs)
QuasarAttention.forward = forward
"""
"""Code appended to the layer's file: it rounds the input before the clock starts."""


def repeat(tree: Path, tokens: int, device: str, times: int) -> Entry:
    """Prove the speed of a tree many times in this process."""
    from harness.worker.subject.serve import fork_subject

    subject = fork_subject()
    import torch

    from harness.worker.failures import WorkerError
    from harness.worker.proof import take, time_link, verify

    place = torch.device(device)
    link = time_link(tokens, place)
    subject.ask("load", tree=str(tree))
    subject.ask("use", device=device, single=False)
    seconds, refused, verifying = [], [], 0.0
    for _ in range(times):
        try:
            proof = take(subject, tokens, place)
            seconds.append(proof.seconds_per_call(link))
            began = time.monotonic()
            verify(proof, place)
            verifying += time.monotonic() - began
        except WorkerError as error:
            refused.append(str(error))
    subject.end()
    figures = {
        "proofs": times,
        "refused": len(refused),
        "link_seconds": link,
        "verification_seconds": verifying / times,
    }
    return Entry(
        table="repeats",
        of={"tokens": tokens},
        figures=figures,
        series={"call_seconds": seconds},
        texts={str(n): reason for n, reason in enumerate(refused)},
    )


def agreement(trees: Mapping[str, Path], tokens: int, device: str) -> Iterator[Entry]:
    """Time each tree in fresh processes by both clocks alternately; yield speeds in tokens/s."""
    results: dict[str, list[float]] = {"loop": [], **{name: [] for name in trees}}
    for _ in range(RUNS):
        results["loop"] += [
            speed for _, speed in validator_runs(trees["proof"], [tokens], device, 1)
        ]
        for name, tree in trees.items():
            try:
                timed = runner.measure(tree, tokens, Options(device), proven=True)
            except MeasurementError as error:
                progress(f"{name}, {tokens:,} tokens: {error}")
                continue
            results[name].append(timed.tokens_per_sec)
            progress(f"{name}, {tokens:,} tokens: {timed.tokens_per_sec / 1e6:.3f} M/s")
    for name, speeds in results.items():
        if speeds:
            ratio = {"ratio": median(speeds) / median(results["loop"])}
            yield Entry(
                table="speeds",
                of={"tokens": tokens},
                by=name,
                figures=ratio,
                series={"tokens_per_sec": speeds},
            )


options = commands.fork_option


def measure(args: argparse.Namespace) -> Iterator[Run]:
    machine = probe()
    run = start("claim_proof", "", args.commit, device=None)
    run = run.model_copy(update={"environment": machine})
    with tempfile.TemporaryDirectory() as name:
        tree, cheat = (
            make_tree(args.fork, Path(name, one), TREES["overlay"]) for one in ("tree", "cheat")
        )
        with (cheat / "fla/layers/quasar.py").open("a") as file:
            file.write(CHEAT)
        trees = {"proof": tree, ROUNDED: cheat}
        for tokens in LENGTHS[machine.device]:
            run = run.adding(*agreement(trees, tokens, machine.device))
            times = min(REPEATS, 20_000_000 // tokens)
            run = run.adding(processes.call(repeat, tree, tokens, machine.device, times))
            yield run


def misses(run: Run) -> list[str]:
    """Return a line for each refused proof and each length at which the clocks differ."""
    criteria = [
        f"{one.figures['refused']} of {one.figures['proofs']} proofs are refused at "
        f"{one.of['tokens']} tokens"
        for one in run.table("repeats")
        if one.figures["refused"]
    ]
    return criteria + [
        f"{one.figures['ratio']:.4f} of the loop's speed at {one.of['tokens']} tokens, limit 1%"
        for one in run.table("speeds")
        if one.by == "proof" and one.of["tokens"] in EXACT and abs(one.figures["ratio"] - 1) > 0.01
    ]
