"""Judge the referee's clock on this machine: agreement with a validator's loop, and how it errs.

    python -m benchmarks.honesty.proof --fork PATH --out FILE

PATH is a checkout of the public fork, over which this project's kernels are laid. For each length,
fresh processes time the tree in turn by the referee's clock, by `validator_loop.py`, and by the
referee's clock with a cheat in the layer. Then one process proves its speed many times in a row,
each time with other weights and inputs. The file is JSON; the exit status is 1 when a limit is
missed. Ten minutes or so on an H200; `--lengths` and `--repeats` make it shorter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine import commands
from benchmarks.honesty.acceptance import validator_runs
from benchmarks.layer.trees import TREES, make_tree
from benchmarks.results import ROOT
from harness.measuring.runner import MeasurementError, Options, measure, probe
from harness.source import tree_commit

LENGTHS = {"cuda": (512, 16_384, 100_000, 1_000_000), "cpu": (512, 2048)}
EXACT = (16_384, 100_000, 1_000_000)
"""Lengths at which both clocks must agree within 1%."""

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
"""Is appended to the layer's file: the input is rounded before the clock starts."""


def repeat(tree: str, tokens: int, device: str, times: int) -> None:
    """Prove the speed of a tree many times in this process, and print JSON."""
    from harness.worker.referee import fork_subject

    subject = fork_subject()
    import torch

    from harness.worker.failures import WorkerError
    from harness.worker.proof import take, time_link, verify

    place = torch.device(device)
    link = time_link(tokens, place)
    subject.ask("load", tree=tree)
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
    print(
        json.dumps(
            {
                "proofs": times,
                "refused": refused,
                "link_seconds": link,
                "call_seconds": seconds,
                "verification_seconds": verifying / times,
            }
        )
    )


def agreement(trees: dict[str, Path], tokens: int, device: str, runs: int) -> dict[str, Any]:
    """Time a tree in fresh processes, by one clock and the other in turn; speeds in tokens/s."""
    found: dict[str, list[float]] = {"loop": [], **{name: [] for name in trees}}
    for _ in range(runs):
        found["loop"] += [speed for _, speed in validator_runs(trees["proof"], [tokens], device, 1)]
        for name, tree in trees.items():
            try:
                speed = measure(tree, tokens, Options(device), proven=True).tokens_per_sec
            except MeasurementError as error:
                commands.say(f"{name}, {tokens:,} tokens: {error}")
                continue
            found[name].append(speed)
            commands.say(f"{name}, {tokens:,} tokens: {speed / 1e6:.3f} M/s")
    middle = {name: median(speeds) for name, speeds in found.items() if speeds}
    return {"speeds": found, "ratio": {name: one / middle["loop"] for name, one in middle.items()}}


def main() -> None:
    """Judge and write the figures."""
    if sys.argv[1:2] == ["--repeat"]:
        repeat(sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
        return
    parser = commands.options(__doc__, fork=True)
    parser.add_argument("--runs", type=int, default=5, help="processes of each kind at a length")
    parser.add_argument("--repeats", type=int, default=100, help="proofs in one process")
    parser.add_argument("--lengths", type=int, nargs="*", help="in tokens")
    args = parser.parse_args()
    machine = probe()
    rows: dict[int, Any] = {}
    failed = []
    with tempfile.TemporaryDirectory() as name:
        tree, cheat = (
            make_tree(args.fork, Path(name, one), TREES["overlay"]) for one in ("tree", "cheat")
        )
        with (cheat / "fla/layers/quasar.py").open("a") as file:
            file.write(CHEAT)
        for tokens in args.lengths or LENGTHS[machine.device]:
            rows[tokens] = agreement(
                {"proof": tree, "input kept in bf16": cheat}, tokens, machine.device, args.runs
            )
            times = max(1, min(args.repeats, 20_000_000 // tokens))
            command = ["--repeat", str(tree), str(tokens), machine.device, str(times)]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.honesty.proof", *command],
                stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT,
            )  # fmt: skip
            rows[tokens] |= json.loads(done.stdout.splitlines()[-1])
            ratio = rows[tokens]["ratio"]["proof"]
            commands.say(f"{tokens:,} tokens: {ratio:.4f} of the loop's speed")
            if refused := len(rows[tokens]["refused"]):
                failed.append(f"{refused} of {times} proofs are refused at {tokens} tokens")
            if tokens in EXACT and abs(ratio - 1) > 0.01:
                failed.append(f"{ratio:.4f} of the loop's speed at {tokens} tokens, limit 1%")
    report = {
        "created": datetime.now(timezone.utc).isoformat(),
        "commit": args.commit or tree_commit(ROOT),
        "environment": machine.model_dump(mode="json"),
        "lengths": rows,
        "missed": failed,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(*failed, sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
