"""`python -m tests.adversarial.arena time`: run a worker's tasks on several trees.

It reads `[[task, tree, length], ...]` in JSON from stdin and prints a list of verdicts. It imports
torch only once, and forks a subject for each tree. The last argument of a real worker that times a
tree is `time`, so a cheat may look for it. To save time, proofs have fewer and shorter chains than
a real worker's, and correctness checks a smaller layer.
"""

import json
import os
import sys
from functools import cache

import torch

from harness.measuring.job import Job
from harness.sample import Correctness
from harness.worker import proof
from harness.worker.subject.serve import fork_subject
from harness.worker.tasks import perform
from harness.workload import WORKLOAD
from quasar_kernels.reference import quasar_chunked

CHAINS, PAIRS, MAX_TOKENS = 1, 2, 1 << 12
"""Timed chains of a proof, further ones if these are too slow, and a chain's maximum of tokens."""

CHECKED = {"hidden_size": 128, "num_heads": 2}
WHOLE = {name: getattr(WORKLOAD, name) for name in CHECKED}
"""Sizes of the layer in correctness checks, and in timed calls."""


def verdict(task: str, tree: str, length: int) -> str:
    """Return the failure, the speed or the failed checks of a tree; "" if a check passed."""
    for name, size in (CHECKED if task == "check" else WHOLE).items():
        object.__setattr__(WORKLOAD, name, size)  # frozen, and imported by many modules
    subject = fork_subject()
    try:
        job = {"task": task, "tree": tree, "length": length, "device": "cpu"}
        reply, _ = perform(
            Job.model_validate({**job, "result_fd": 3, "nonce": "", "parent": os.getpid()}), subject
        )
    finally:
        subject.end()
    if reply.failure is not None:
        return f"{reply.failure}: {reply.reason}"
    if task != "check":
        return f"passed: {(reply.body or {})['tokens_per_sec']} tokens/s"
    return "; ".join(str(check) for check in Correctness.model_validate(reply.body).failed)


def main() -> None:
    """Print the verdicts on the trees that stdin names."""
    proof.CHAINS_OF_SHORT, proof.PAIRS, proof.VERIFIED_TOKENS["cpu"] = CHAINS, PAIRS, MAX_TOKENS
    proof.time_link = cache(proof.time_link)
    warm = torch.ones(1, 65, 1, 16, dtype=torch.float64)
    quasar_chunked(warm, warm, warm, torch.ones(1))  # torch's slow first calls, before the forks
    output = sys.stdout
    sys.stdout = sys.stderr  # for what the trees print
    json.dump([verdict(*one) for one in json.load(sys.stdin)], output)


if __name__ == "__main__":
    main()
