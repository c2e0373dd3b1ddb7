"""`python -m tests.adversarial.arena time`: run a worker's tasks on several trees.

It reads `[[task, tree, length], ...]` in JSON from stdin and prints a list of verdicts. It imports
torch only once, and forks a subject for each tree. The last argument of a real worker that times a
tree is `time`, so a cheat may look for it. Proofs have fewer and shorter chains than a real
worker's.
"""

import json
import os
import sys

import torch

from harness.measuring.job import Job
from harness.sample import Correctness
from harness.worker import proof
from harness.worker.subject.serve import fork_subject
from harness.worker.tasks import perform
from quasar_kernels.reference import quasar_chunked

CHAINS, MAX_TOKENS = 2, 1 << 13
"""Timed chains of a proof, and most tokens of each, of which the referee computes all."""


def verdict(task: str, tree: str, length: int) -> str:
    """Return the failure, the speed or the failed checks of a tree; "" if a check passed."""
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
    proof.CHAINS_OF_SHORT, proof.VERIFIED_TOKENS["cpu"] = CHAINS, MAX_TOKENS
    warm = torch.ones(1, 65, 1, 16, dtype=torch.float64)
    quasar_chunked(warm, warm, warm, torch.ones(1))  # torch's slow first calls, before the forks
    output = sys.stdout
    sys.stdout = sys.stderr  # for what the trees print
    json.dump([verdict(*one) for one in json.load(sys.stdin)], output)


if __name__ == "__main__":
    main()
