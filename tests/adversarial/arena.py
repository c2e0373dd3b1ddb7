"""`python -m tests.adversarial.arena time`: judge trees, one after another, as a worker does.

Reads JSON from stdin, `[[task, tree, length], ...]`, and prints for each what was found against it,
or an empty text. One import of torch serves all of them; each tree has a process of its own.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from harness.measuring.job import Job
from harness.sample import Correctness
from harness.worker.referee import fork_subject
from harness.worker.tasks import perform
from quasar_kernels.reference import quasar_chunked


def verdict(task: str, tree: str, length: int) -> str:
    """Return what a worker finds against a tree."""
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
    """Judge what stdin names."""
    warm = torch.ones(1, 65, 1, 16, dtype=torch.float64)
    quasar_chunked(warm, warm, warm, torch.ones(1))  # what starts slowly has started in all of them
    said = sys.stdout
    sys.stdout = sys.stderr
    json.dump([verdict(*one) for one in json.load(sys.stdin)], said)


if __name__ == "__main__":
    main()
