"""Search the tiles of the Triton kernels for this GPU; store tiles that are significantly faster.

    scripts/install.sh tuning
    python -m harness.tuning [--trials N] [--seconds N] [--lengths 16384,1000000]

Trials are stored in tuning.sqlite, so the next run continues an interrupted one. With --gpus N, N
GPUs of one model try candidates at the same time, and the first GPU compares the best one. Every
candidate is compared with the float64 definition before it is timed. The result contains an entry
of tuned.json with its evidence; --overlay adds it to that file, as a miner with AGENT_ITERATIONS
does in idle time. `scripts/step2_kernel_tuning.py` is the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.analysis.ab_compare import BLOCKS
from harness.imports import install_command
from harness.terminal import ends_quietly
from harness.workload import parse_lengths

EX_CONFIG = 78


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100, help="of the whole study (100)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for this run (600)")
    parser.add_argument(
        "--lengths", type=parse_lengths, default="16384,100000,1000000", help="in tokens"
    )
    parser.add_argument("--storage", default="tuning.sqlite", help="SQLite file, or a database URL")
    parser.add_argument("--out", type=Path, default=Path("tuned-here.json"))
    parser.add_argument(
        "--start",
        type=json.loads,
        default={},
        help='JSON of fields to start from, such as {"chunk": 32}',
    )
    parser.add_argument("--more", type=int, help="trials of this run, instead of --trials")
    parser.add_argument(
        "--overlay",
        type=Path,
        help="kernels whose tuned.json is read, and updated if a candidate wins",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs of the first one's model that search (1)"
    )
    parser.add_argument("--only-search", action="store_true", help="compare and write nothing")
    return parser.parse_args(argv)


def _only_search(arguments: argparse.Namespace, trials: int, start: dict[str, int]) -> list[str]:
    """Return the command that searches on another GPU until the study has `trials` trials."""
    options = {
        "trials": trials,
        "seconds": arguments.seconds,
        "storage": arguments.storage,
        "lengths": ",".join(map(str, arguments.lengths)),
        "start": json.dumps(start),
    }
    command = [sys.executable, "-m", "harness.tuning", "--only-search"]
    return command + [f"--{name}={value}" for name, value in options.items()]


def further_gpus(gpus: Sequence[Any], count: int) -> list[str]:
    """Return the UUIDs of up to `count` other GPUs of the first one's model.

    Times are relative to those of the start on the same GPU, so differences between GPUs cancel.
    """
    first, *others = gpus
    return [f"GPU-{gpu.uuid}" for gpu in others if gpu.name == first.name][:count]


@contextmanager
def searchers(command: Sequence[str], gpus: Sequence[str]) -> Iterator[None]:
    """Run `command` on each GPU and wait for all at the end; an error in the block kills them."""
    processes = [
        subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus
    ]
    try:
        yield
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.kill()
            process.wait()


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    """Search, compare the best tiles with the start, write the result; return the exit status."""
    arguments = parse(argv)
    try:
        import optuna  # noqa: F401 # `--help` works without it
    except ImportError:
        sys.stderr.write(f"The search needs Optuna. Run {install_command('optuna')}.\n")
        return EX_CONFIG
    from harness.tuning.candidates import Candidates
    from harness.tuning.entry import TUNED, tiles_of, with_tiles
    from harness.tuning.study import best_tiles, conclude, done, open_study, search

    lengths = sorted(arguments.lengths)
    candidates = Candidates(lengths)
    data = arguments.overlay and arguments.overlay / TUNED
    present = tiles_of(json.loads(data.read_text()), candidates.gpu) if data else {}
    start = {**candidates.shipped, **present, **arguments.start}
    storage = arguments.storage if "://" in arguments.storage else Path(arguments.storage)
    study = open_study(storage, candidates.name)
    before = done(study)
    trials = arguments.trials if arguments.more is None else before + arguments.more
    others = further_gpus(candidates.gpus, arguments.gpus - 1)
    with searchers(_only_search(arguments, trials, start), others):
        search(
            *(study, start, candidates.objective(start)),
            trials=trials,
            seconds=arguments.seconds,
            footprint=lambda: candidates.footprint,
        )
    if arguments.only_search:
        return 0
    sys.stdout.write(f"{candidates.name}: {before} trials before, {done(study)} now\n")
    blocks = candidates.compare(start, best_tiles(study), BLOCKS)
    tiles, gain, evidence = conclude(study, blocks)
    sys.stdout.write(f"A is the start, B the best of the search. {gain}\n")
    result = {**candidates.gpu, "tiles": tiles, "lengths": lengths, "evidence": evidence}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if data and evidence["taken"]:
        entered = with_tiles(json.loads(data.read_text()), result)
        data.write_text(json.dumps(entered, indent=2) + "\n")
    verdict = "taken" if evidence["taken"] else "the start stays"
    sys.stdout.write(f"{verdict}: {tiles}\nwritten to {arguments.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
