"""Judge the harness on this GPU: the cycle's times, validators' runs of the claim, and agreement.

    python -m benchmarks.honesty.acceptance --fork PATH --out benchmarks/h200/acceptance.json

PATH is a checkout of the public fork. The claim is measured as the miner measures it, twice: from
nothing, and confirmed by one run. Then `validator_loop.py`, which knows nothing of the harness, is
run in fresh processes: at the target for the claim, and at other lengths beside the harness. Seven
minutes or so on an H200. The exit status is 1 when a limit is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.engine import commands
from benchmarks.engine.limits import missed
from benchmarks.honesty.page import acceptance_limits
from benchmarks.honesty.results import Acceptance, Agreement
from benchmarks.layer.trees import TREES, make_tree
from benchmarks.results import ROOT, write
from harness.claim import derive_claim
from harness.hardware.machine import Environment
from harness.measuring.plan import ForClaim
from harness.measuring.runner import Options, call, child_environment, probe
from harness.measuring.sampler import Policy, Sampler, processes_at_once
from harness.source import tree_commit
from harness.workload import VALIDATOR_LENGTHS

LOOP = Path(__file__).with_name("validator_loop.py")
COMPARED = (16_384, 100_000, 1_000_000)
"""Lengths at which both loops must agree."""

COMPARED_RUNS = 14
"""Validators' runs of such a length: medians of five differ by 1% in one case of ten by chance."""


def validator_runs(
    tree: Path, lengths: Sequence[int], device: str, at_once: int
) -> list[tuple[int, float]]:
    """Return the speed of a fresh process at each of `lengths`; one is timed at a time."""
    found = []
    for start in range(0, len(lengths), at_once):
        some = lengths[start : start + at_once]
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
        for process in started:  # all of them import before one is timed
            assert process.stdout is not None  # noqa: S101 # it is a pipe
            while (line := process.stdout.readline()) != "ready\n":
                if not line:
                    sys.exit(f"the validator's loop ended with status {process.wait()}")
        for tokens, process in zip(some, started, strict=True):
            said, _ = process.communicate("\n")
            found.append((tokens, float(said.split()[-1])))
            commands.say(f"validator's loop, {tokens:,} tokens: {found[-1][1] / 1e6:.3f} M/s")
    return found


def sampler_of(tree: Path, machine: Environment) -> Sampler:
    """Return a sampler without samples as the miner has it."""
    options = Options("cuda", 60.0)
    soak = partial(call, "harness.worker.machine.soak:soak", 12.0, options=options)
    return Sampler(
        tree=tree,
        options=Options(machine.device),
        policy=Policy(attempts=3),
        soak=soak if machine.device == "cuda" else None,
        at_once=processes_at_once(machine),
    )


def judge(tree: Path, target: int, runs: int, compared: Sequence[int]) -> Acceptance:
    """Measure, claim, and let the other loop judge both."""
    began = time.monotonic()
    machine = probe()
    at_once = processes_at_once(machine)
    sampler = sampler_of(tree, machine)
    sampler.run(ForClaim(target, VALIDATOR_LENGTHS, at_once=at_once))
    cycle = time.monotonic() - began
    claim = derive_claim({target: sampler.of(target)}, target)
    commands.say(f"measured in {cycle:.0f} s: {claim}")

    began = time.monotonic()
    again = sampler_of(tree, probe())
    again.samples = list(sampler.samples)
    existing = len(sampler.of(target))
    again.run(ForClaim(target, VALIDATOR_LENGTHS, at_once=at_once, confirming=existing))
    confirm = time.monotonic() - began
    commands.say(f"confirmed in {confirm:.0f} s")

    for tokens in compared:
        sampler.run(ForClaim(tokens, at_once=at_once))
    wanted = [target] * runs + [n for n in compared if n != target for _ in range(COMPARED_RUNS)]
    found = validator_runs(tree, wanted, machine.device, at_once)
    speeds = {n: tuple(speed for tokens, speed in found if tokens == n) for n in set(wanted)}
    return Acceptance(
        target=target,
        cycle_seconds=cycle,
        confirm_seconds=confirm,
        claim=claim.tokens_per_sec,
        claim_runs=claim.runs,
        limits=claim.limits,
        validator=speeds[target],
        agreements=tuple(
            Agreement(
                tokens=n,
                harness=median(m.tokens_per_sec for m in sampler.of(n)),
                validator=median(speeds[n]),
                host_share=max((m.host_seconds or 0) / m.elapsed_seconds for m in sampler.of(n)),
                cold_call_ms=_cold_ms(sampler, n),
            )
            for n in compared
        ),
        environment=machine,
        created=datetime.now(timezone.utc).date(),
        commit=tree_commit(ROOT),
    )


def _cold_ms(sampler: Sampler, tokens: int) -> float | None:
    calls = [seconds for m in sampler.of(tokens) for seconds in m.call_seconds]
    return median(calls) * 1e3 if calls else None


def main() -> None:
    """Judge and write the figures."""
    parser = commands.options(__doc__, fork=True)
    parser.add_argument("--target", type=int, default=1_000_000, help="what is claimed for")
    parser.add_argument("--runs", type=int, default=20, help="validators' runs of the claim")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tree = make_tree(args.fork, Path(name, "tree"), TREES["overlay"])
        found = judge(tree, args.target, args.runs, COMPARED)
    if args.commit:
        found = found.model_copy(update={"commit": args.commit})
    write(args.out, found)
    for criterion in acceptance_limits(found):
        print(*criterion.cells(), sep="; ")
    sys.exit(1 if missed(acceptance_limits(found)) else 0)


if __name__ == "__main__":
    main()
