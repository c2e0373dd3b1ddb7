"""Change a module in many small ways, and count the changes that its tests notice.

    python -m benchmarks.mutants.run harness/claim/derive.py [--most 100] [--more] [--left]

writes the module's figures and the mutants that were left into benchmarks/mutants.json, of which
`python -m benchmarks.report` makes the tables in docs/reliability.md. A mutant meets the tests that
reach its lines until one fails, be it that it takes four times as long as without a mutant and
15 s at least. They run in a copy of the tree, so that the checkout stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.mutants.making import Mutant, mutants_of
from benchmarks.mutants.results import Left, Module, load, write
from benchmarks.results import ROOT
from harness.source import tree_commit

MINING = "tests/neurons/miner"
STEPS = (
    f"{MINING}/test_rounds.py",
    f"{MINING}/steps",
    "tests/faults/test_api.py",
    "tests/faults/test_measuring.py",
)
GATE = (
    "tests/harness/worker/test_gate.py",
    "tests/harness/worker/test_gate_stages.py",
    "tests/harness/worker/test_rules.py",
)
TESTS: dict[str, tuple[str, ...]] = {
    "harness/analysis/stats.py": ("tests/harness/analysis/test_stats.py",),
    "harness/claim/derive.py": ("tests/harness/claim",),
    "harness/claim/rejection.py": ("tests/harness/claim",),
    "harness/claim/tolerance.py": ("tests/harness/claim",),
    "harness/gates/branches.py": ("tests/harness/gates",),
    "harness/gates/checks.py": ("tests/harness/gates",),
    "harness/gates/command.py": ("tests/harness/gates",),
    "harness/gates/findings.py": ("tests/harness/gates",),
    "harness/gates/training.py": ("tests/harness/gates",),
    "harness/measuring/together.py": ("tests/harness/measuring/test_together.py",),
    "harness/hardware/roofline.py": ("tests/harness/hardware/test_roofline.py",),
    "harness/worker/gate.py": GATE,
    "harness/worker/rules.py": GATE,
    "neurons/wire/outcomes.py": ("tests/neurons/wire",),
    "neurons/miner/rounds.py": STEPS,
    **{
        f"neurons/miner/steps/{step}.py": STEPS
        for step in ("publish", "measure", "claim", "commit", "reveal", "submit", "follow")
    },
    "neurons/miner/cycle.py": (f"{MINING}",),
    "neurons/miner/journal.py": (f"{MINING}",),
    "neurons/miner/schema.py": (f"{MINING}",),
    "neurons/wire/rules.py": ("tests/neurons/wire/test_rules.py",),
    "neurons/validator/verdict.py": ("tests/neurons/validator/test_verdict.py",),
    "neurons/validator/weights.py": ("tests/neurons/validator/test_weights.py",),
    "neurons/validator_api/access/auth.py": ("tests/neurons/validator_api/access",),
    **{
        f"neurons/validator_api/competition/{part}.py": (
            "tests/neurons/validator_api/test_rounds.py",
        )
        for part in ("ranking", "rounds")
    },
    "quasar_kernels/contract.py": ("tests/quasar_kernels/test_contract.py",),
}
"""The tests that belong to a module, whose mutants they have to notice."""


def copied(folder: Path) -> Path:
    """Copy what git tracks, or would, below `folder`; return the copy."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def tried(tests: tuple[str, ...], mutants: list[tuple[str, Mutant]]) -> Iterator[bool]:
    """Try mutants of modules one by one, and tell of each whether a test noticed it.

    Raises:
        SystemExit: the tests fail on the modules as they are.
    """
    memory = Path("/dev/shm")  # noqa: S108 - journals are flushed to the disk all the time
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        tree = copied(Path(folder, "tree"))
        job: dict[str, Any] = {"tests": tests, "limit": 600, "timeout": 15}
        job["paths"] = sorted({path for path, _ in mutants})
        job["mutants"] = [{"path": path, **one._asdict()} for path, one in mutants]
        given = Path(folder, "job.json")
        given.write_text(json.dumps(job))
        command = [sys.executable, "-m", "benchmarks.mutants.trying"]
        quiet = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        with (
            given.open() as read,
            subprocess.Popen(
                command, cwd=tree, env=quiet, stdin=read, stdout=subprocess.PIPE, text=True
            ) as child,
        ):
            try:
                yield from (json.loads(line)["status"] != 0 for line in child.stdout or ())
            except GeneratorExit:  # the time is up
                child.terminate()
                raise
        if child.returncode != 0:
            sys.exit(f"benchmarks.mutants.trying ended with status {child.returncode}")


def earlier(path: str) -> Module:
    """Return a module's figures.

    Raises:
        SystemExit: it has none.
    """
    for one in load().modules:
        if one.path == path:
            return one
    sys.exit(f"{path} has no mutants that were left, as none was tried; run it without --left")


def chosen(path: str, every: list[Mutant], given: argparse.Namespace) -> list[Mutant]:
    """Return the mutants of a module to try: all, some by chance, or the gaps that were left.

    Raises:
        SystemExit: the module is another one than that whose mutants were tried.
    """
    if not given.left:
        shuffled = list(every)
        random.Random(given.seed).shuffle(shuffled)
        first = _tried_before(path, shuffled, given.seed) if given.more else 0
        return shuffled[first:][: given.most]
    before = earlier(path)
    gaps = [one for one in before.left if not one.equivalent]
    again = {(one.operator, one.line, one.before, one.after) for one in gaps}
    found = [one for one in every if (one.operator, one.line, one.before, one.after) in again]
    if len(found) != len(gaps):
        sys.exit(f"{path} has changed since its mutants were tried; run it without --left")
    return found


def _tried_before(path: str, shuffled: list[Mutant], seed: int) -> int:
    before = earlier(path)
    same = {(one.before, one.after) for one in shuffled[: before.tried]}.issuperset(
        (one.before, one.after) for one in before.left
    )
    if before.seed != seed or before.made != len(shuffled) or not same:
        sys.exit(f"{path} or the seed has changed since its mutants were tried; leave out --more")
    return before.tried


def mixed(mutants: dict[str, list[Mutant]], seed: int) -> list[tuple[str, Mutant]]:
    """Return the mutants of all modules, mixed by chance, those of each in their order.

    So what time allows is of all modules, and the first of each.
    """
    places = [path for path, some in mutants.items() for _ in some]
    random.Random(seed).shuffle(places)
    left = {path: iter(some) for path, some in mutants.items()}
    return [(path, next(left[path])) for path in places]


def mutate(paths: list[str], tests: tuple[str, ...], given: argparse.Namespace) -> None:
    """Try mutants of modules that share their tests, and write what comes of them."""
    every = {path: mutants_of((ROOT / path).read_text(encoding="utf-8")) for path in paths}
    mutants = mixed({path: chosen(path, every[path], given) for path in paths}, given.seed)
    if not mutants:
        print(f"nothing to try in {', '.join(paths)}")
        return
    ends = 0.0
    done, missed = Counter[str](), []
    for (path, one), noticed in zip(mutants, tried(tests, mutants), strict=False):
        done[path] += 1
        ends = ends or time.monotonic() + 60 * given.minutes
        if not noticed:
            missed.append((path, one))
            print(
                f"{path}:{one.line} {one.operator}\n  - {one.before}\n  + {one.after}", flush=True
            )
        if time.monotonic() > ends:
            break
    for path in paths:
        found = Module(
            path=path,
            created=datetime.now(timezone.utc).date(),
            commit=tree_commit(ROOT),
            seed=given.seed,
            made=len(every[path]),
            tried=done[path],
            left=tuple(
                Left(operator=one.operator, line=one.line, before=one.before, after=one.after)
                for where, one in missed
                if where == path
            ),
        )
        if given.left:
            before = earlier(path)
            kept = tuple(one for one in before.left if one.equivalent)
            found = before.model_copy(update={"left": kept + found.left})
        elif given.more:
            before = earlier(path)
            both = {"tried": before.tried + found.tried, "left": before.left + found.left}
            found = found.model_copy(update=both)
        write(found)
        print(f"{path}: {found.noticed} of {found.tried} noticed", flush=True)


def main() -> None:
    """Try mutants of the modules that are named, those that share their tests together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="+", metavar="MODULE", choices=sorted(TESTS))
    parser.add_argument("--most", type=int, help="so many of each, by chance (all)")
    parser.add_argument("--minutes", type=float, default=1e9, help="for each set of tests (no end)")
    parser.add_argument("--seed", type=int, default=19, help="of the chance (19)")
    parser.add_argument("--more", action="store_true", help="others than those tried before")
    parser.add_argument("--left", action="store_true", help="the gaps that were left, once more")
    given = parser.parse_args()
    for tests in dict.fromkeys(TESTS[path] for path in given.modules):
        mutate([path for path in given.modules if TESTS[path] == tests], tests, given)


if __name__ == "__main__":
    main()
