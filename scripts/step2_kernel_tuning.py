"""Search the tiles of the Triton kernels for this GPU, and write what wins beyond the noise.

    pip install -e .[tuning]
    python scripts/step2_kernel_tuning.py [--trials N] [--seconds N] [--lengths 16384,1000000]

Trials are kept in tuning.sqlite: a run that ends, however it ends, is taken up by the next one,
and several GPUs of one kind may search in it at once. Every candidate is compared with the float64
definition before it is timed. The result has what an entry of tuned.json needs, with its evidence.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.operator.candidates import Candidates
from benchmarks.operator.study import best_tiles, conclude, done, open_study, search

PAIRS = 8


def main() -> None:
    """Search, compare the best with the start in turns, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100, help="of the whole study (100)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for this run (600)")
    parser.add_argument("--lengths", default="16384,100000,1000000", help="in tokens")
    parser.add_argument("--storage", default="tuning.sqlite", help="SQLite file, or a database URL")
    parser.add_argument("--out", type=Path, default=Path("tuned-here.json"))
    parser.add_argument("--start", type=json.loads, default={},
                        help='JSON of fields to start from, such as {"chunk": 32}')  # fmt: skip
    given = parser.parse_args()

    lengths = sorted(int(length) for length in given.lengths.split(","))
    candidates = Candidates(lengths)
    start = {**candidates.shipped, **given.start}
    storage = given.storage if "://" in given.storage else Path(given.storage)
    study = open_study(storage, candidates.name)
    before = done(study)
    search(study, start, candidates.objective(start), trials=given.trials, seconds=given.seconds)
    print(f"{candidates.name}: {before} trials before, {done(study)} now")
    pairs = candidates.in_turns(start, best_tiles(study), PAIRS)
    tiles, found, evidence = conclude(study, pairs)
    print(f"A is the start, B the best of the search. {found}")
    result = {**candidates.gpu, "tiles": tiles, "lengths": lengths, "evidence": evidence}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'taken' if evidence['taken'] else 'the start stays'}: {tiles}\nwritten to {given.out}")


if __name__ == "__main__":
    main()
