"""Which sequences Triton's kernels cut into segments on a GPU of 132 multiprocessors.

The CUDA kernels' segments are tested in cuda/scan/test_forward.py.
"""

import itertools

import pytest
import torch
from fla.ops.quasar.triton_kernels import plan as operator

from quasar_kernels.blocks.ssd_triton import launch as ssd
from quasar_kernels.blocks.triton_segments import plan as mixers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(operator, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(mixers, "_multiprocessors", lambda _: 132)


def of_operator(B, T, heads, width, dtype, bounds=None):
    q = torch.empty(1, dtype=dtype).expand(B, T, heads, width)
    plan = operator.plan_segments(q, bounds)
    return plan.total, plan.sequences


def of_mixers(B, T, heads, width, dtype, bounds=None):
    shape = mixers.Shape(B, T, heads, 64, width)
    cut = mixers.plan_call(shape, CPU, bounds, None, ssd.tiles_for(64, width, dtype)).segments
    return cut.total, cut.sequences


@pytest.mark.parametrize("segments_of", [of_operator, of_mixers])
def test_only_batches_that_do_not_fill_the_gpu_are_cut(segments_of):
    for batch, whole in ((2, False), (4, False), (32, True), (64, True)):
        total, sequences = segments_of(batch, 2048, 8, 64, torch.bfloat16)
        assert (total == sequences) == whole, batch


@pytest.mark.parametrize("segments_of", [of_operator, of_mixers])
@pytest.mark.parametrize(
    ("lengths", "whole"),
    [([3000, 0, 1, 2047] * 20, True), ([0, 0], True), ([30_000] + [1] * 100, False)],
)
def test_packed_sequences_are_cut_if_one_would_run_almost_alone(segments_of, lengths, whole):
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    total, sequences = segments_of(1, sum(lengths), 8, 64, torch.bfloat16, bounds)
    assert sequences == len(lengths)
    assert (total == sequences) == whole


def test_wide_programs_count_by_their_warps():
    """In fp32 and for heads of 128, more warps process a head than in bf16 for heads of 64."""
    for width, dtype, whole in (
        (64, torch.bfloat16, False),
        (64, torch.float32, True),
        (128, torch.bfloat16, True),
    ):
        total, sequences = of_operator(16, 4096, 8, width, dtype)
        assert (total == sequences) == whole, (width, dtype)
