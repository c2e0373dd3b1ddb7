"""Training on two GPUs: DistributedDataParallel and FSDP2 do what one GPU does."""

from __future__ import annotations

import pytest
import torch

from benchmarks.recall.processes import in_group
from benchmarks.recall.results import Task
from tests.training_steps import assert_same, take_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]

SHORT, LONG = Task(900, 512, 64, 8), Task(900, 4096, 64, 8)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("task", [SHORT, LONG], ids=["replayed", "kept"])
def test_two_gpus_take_the_steps_of_one(way, task):
    wanted = take_steps(torch.device("cuda", 0), task, 512, 8, "alone")
    found = in_group(2, "cuda", take_steps, task, 512, 8, way)
    assert_same(found, wanted, first=1e-5, moved=2e-2)
    assert bool(found.graphs) == (task is SHORT)
