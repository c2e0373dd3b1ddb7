"""Faults of a worker on the GPU: out of memory, and kills."""

from __future__ import annotations

import os
import signal
import threading
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

from benchmarks.cases.trees import TREES, make_tree
from harness.measuring.runner import MeasurementError, Options, measure
from tests.processes import HANG, wait_for

pytestmark = pytest.mark.gpu

SLACK = 1 << 30
"""Bytes by which the free memory may differ, because other processes may share the GPU."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fork: the installed fla with the overlay."""
    fla = Path(str(distribution("fla-core").locate_file("")))
    return make_tree(fla, tmp_path_factory.mktemp("fork") / "tree", TREES["overlay"])


CUDA = Options("cuda")


def free() -> int:
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def assert_next_measurement_succeeds(tree: Path, before: int) -> None:
    wait_for(lambda: free() >= before - SLACK)
    assert measure(tree, 512, CUDA, cross_check=False).tokens_per_sec > 0


@pytest.mark.parametrize("share", [2.0, 0.6], ids=["input", "layer"])
def test_row_22_a_length_beyond_the_memory(tree: Path, share: float) -> None:
    before = free()
    length = int(share * before / (4 * 512))  # the fp32 input needs this share of the memory
    with pytest.raises(MeasurementError) as found:
        measure(tree, length, CUDA, cross_check=False)
    assert found.value.kind == "out_of_memory"
    assert_next_measurement_succeeds(tree, before)


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, parents before children."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


@pytest.mark.parametrize("place", [0, 1], ids=["referee", "subject"])
def test_row_22_a_killed_worker_releases_the_gpu(tree: Path, place: int) -> None:
    before, errors = free(), []
    length = int(0.1 * before / (4 * 512))

    def run() -> None:
        try:
            measure(tree, length, CUDA, cross_check=False)
        except MeasurementError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: free() < before - 4 * length * 512)  # the input is allocated
    os.kill(descendants(os.getpid())[place], signal.SIGKILL)
    thread.join(HANG)
    # the operating system kills a process mostly for lack of memory
    assert [error.kind for error in errors] == ["out_of_memory"]
    assert_next_measurement_succeeds(tree, before)
