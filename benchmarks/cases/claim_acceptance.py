"""A miner's measurement on this GPU, and validators' runs that test its claim.

    python -m benchmarks claim_acceptance --fork PATH --out benchmarks/h200/acceptance.json

PATH is a checkout of the public fork. The miner's code measures a claim completely, and then
confirms it by a single run; both are timed. Then validator_loop.py, which is independent of the
harness, runs in fresh processes at the target, and at other lengths that the harness has measured.
This takes about seven minutes on an H200. The exit status is 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.cases.trees import TREES, make_tree
from benchmarks.engine import commands
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Run, start
from harness.claim import ACCEPTED_SHARE, derive_claim
from harness.hardware.machine import Environment
from harness.measuring.plan import ForClaim
from harness.measuring.runner import Options, call, child_environment, probe
from harness.measuring.sampler import Policy, Sampler, processes_at_once
from harness.workload import VALIDATOR_LENGTHS

FAILS = True
LOOP = Path(__file__).with_name("validator_loop.py")
TARGET, RUNS = 1_000_000, 20
"""The target of the claim in tokens, and the number of validators' runs at it."""
COMPARED = (16_384, 100_000, 1_000_000)
"""Lengths at which both loops must agree."""
COMPARED_RUNS = 14
"""Number of a validator's runs at such a length. With five runs, the medians of equal speeds would
differ by 1% in 10% of cases."""


def validator_runs(
    tree: Path, lengths: Sequence[int], device: str, at_once: int
) -> list[tuple[int, float]]:
    """Return the speed of a fresh process at each of `lengths`; one is timed at a time."""
    results = []
    for first in range(0, len(lengths), at_once):
        some = lengths[first : first + at_once]
        started = [
            subprocess.Popen(
                [sys.executable, str(LOOP), str(tree), str(tokens)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=child_environment(os.environ, device=device),
            )
            for tokens in some
        ]
        for process in started:  # all processes import before one is timed
            assert process.stdout is not None  # noqa: S101 # Popen got stdout=PIPE
            while (line := process.stdout.readline()) != "ready\n":
                if not line:
                    sys.exit(f"the validator's loop ended with status {process.wait()}")
        for tokens, process in zip(some, started, strict=True):
            output, _ = process.communicate("\n")
            results.append((tokens, float(output.split()[-1])))
            commands.progress(
                f"validator's loop, {tokens:,} tokens: {results[-1][1] / 1e6:.3f} M/s"
            )
    return results


def sampler_of(tree: Path, machine: Environment) -> Sampler:
    """Return a sampler with the miner's settings, without samples."""
    options = Options("cuda", 60.0)
    soak = partial(call, "harness.worker.machine.soak:soak", 12.0, options=options)
    return Sampler(
        tree=tree,
        options=Options(machine.device),
        policy=Policy(attempts=3),
        soak=soak if machine.device == "cuda" else None,
        at_once=processes_at_once(machine),
    )


def judge(tree: Path, run: Run) -> Run:
    """Measure, derive the claim, test both by validator_loop.py; return the run with results."""
    began = time.monotonic()
    machine = probe()
    at_once = processes_at_once(machine)
    sampler = sampler_of(tree, machine)
    sampler.run(ForClaim(TARGET, VALIDATOR_LENGTHS, at_once=at_once))
    cycle = time.monotonic() - began
    claim = derive_claim({TARGET: sampler.of(TARGET)}, TARGET)
    commands.progress(f"measured in {cycle:.0f} s: {claim}")

    began = time.monotonic()
    again = sampler_of(tree, probe())
    again.samples = list(sampler.samples)
    existing = len(sampler.of(TARGET))
    again.run(ForClaim(TARGET, VALIDATOR_LENGTHS, at_once=at_once, confirming=existing))
    confirm = time.monotonic() - began
    commands.progress(f"confirmed in {confirm:.0f} s")

    for tokens in COMPARED:
        sampler.run(ForClaim(tokens, at_once=at_once))
    wanted = [TARGET] * RUNS + [n for n in COMPARED if n != TARGET for _ in range(COMPARED_RUNS)]
    results = validator_runs(tree, wanted, machine.device, at_once)
    speeds = {n: tuple(speed for tokens, speed in results if tokens == n) for n in set(wanted)}
    entries = [
        Entry(
            table="agreement",
            of={"tokens": n},
            figures={
                "harness": median(m.tokens_per_sec for m in sampler.of(n)),
                "validator": median(speeds[n]),
                # of the loop, until the last call had returned
                "host_share": max((m.host_seconds or 0) / m.elapsed_seconds for m in sampler.of(n)),
                **_cold_ms(sampler, n),
            },
        )
        for n in COMPARED
    ]
    validator = Entry(
        table="validator", of={"tokens": TARGET}, series={"tokens_per_sec": speeds[TARGET]}
    )
    return run.model_copy(update={"environment": machine}).adding(
        validator,
        *entries,
        target=TARGET,
        cycle_seconds=cycle,
        confirm_seconds=confirm,
        claim=claim.tokens_per_sec,
        claim_runs=claim.runs,
        **{f"{name} limit": limit for name, limit in claim.limits.items()},
    )


def _cold_ms(sampler: Sampler, tokens: int) -> dict[str, float]:
    calls = [seconds for m in sampler.of(tokens) for seconds in m.call_seconds]
    return {"cold_call_ms": median(calls) * 1e3} if calls else {}


options = commands.fork_option


def measure(args: argparse.Namespace) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as name:
        tree = make_tree(args.fork, Path(name, "tree"), TREES["overlay"])
        run = start("claim_acceptance", "", args.commit, device=None)
        yield judge(tree, run)


def limits(run: Run) -> list[Criterion]:
    claim, (validator,) = run.number("claim"), run.table("validator")
    speeds = validator.series["tokens_per_sec"]
    refuted = sum(speed < ACCEPTED_SHARE * claim for speed in speeds)
    apart = [
        Criterion(
            f"{entry.of['tokens']:,} tokens, harness and validator's loop apart, %",
            abs(entry.figures["harness"] / entry.figures["validator"] - 1),
            0.01,
            scale=100,
        )
        for entry in run.table("agreement")
    ]
    return [
        Criterion("validator's runs that refute the claim", refuted, 0),
        Criterion("claim / median", claim / median(speeds), 0.97, at_least=True),
        Criterion("measuring from nothing, s", run.number("cycle_seconds"), 240),
        Criterion("confirming what was measured, s", run.number("confirm_seconds"), 60),
        *apart,
    ]
