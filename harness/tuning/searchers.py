"""The further GPUs of a search: a process on each tries candidates of the same study.

A candidate's time is relative to that of the start on the same GPU, so differences between the
GPUs do not affect the comparison.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def further_gpus(gpus: Sequence[Any], count: int) -> list[str]:
    """Return the UUIDs of `count` GPUs of the first one's model, or fewer, without the first.

    Args:
        gpus: properties of this process's GPUs, from `torch.cuda.get_device_properties`.
    """
    first, *others = gpus
    return [f"GPU-{gpu.uuid}" for gpu in others if gpu.name == first.name][:count]


@contextmanager
def searchers(command: Sequence[str], gpus: Sequence[str]) -> Iterator[None]:
    """Run `command` once for each GPU, with only that GPU visible; wait for all at the end.

    An error in the block kills them.
    """
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
