"""Where sequences are cut into segments, on a GPU of 132 multiprocessors, and the segments' tables.

The tests of emulated and interpreted kernels run this code with the kernels; this file checks the
rest.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fla.ops.quasar.cuda.program import LoadedProgram, Variant
from fla.ops.quasar.cuda.scan import scan_backward, scan_forward
from fla.ops.quasar.segments import host_bounds, packed_table
from fla.ops.quasar.triton_kernels import plan as operator

from quasar_kernels.blocks.ssd_triton import launch as ssd
from quasar_kernels.blocks.triton_segments import plan as mixers

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    for plan in (operator, mixers):
        monkeypatch.setattr(plan, "multiprocessors", lambda _: 132)


def cuda_program(warps=4):
    """Return a program of which four blocks fit on a multiprocessor."""
    kernel = SimpleNamespace(blocks=4, threads=32 * warps)
    kernels = {"segment_map": kernel, "segment_output": kernel}
    return LoadedProgram(Variant(0, BF16), kernels, 132, False)


def of_cuda(B, T, heads=8, width=64, dtype=BF16, bounds=None, *, warps=4):
    v = torch.empty(1, device="meta", dtype=dtype).expand(B, T, heads, width)
    return scan_forward.cut_segments(cuda_program(warps), tuple(v.shape), v.device, bounds)


def of_operator(B, T, heads=8, width=64, dtype=BF16, bounds=None):
    return operator.plan_segments(torch.empty(1, dtype=dtype).expand(B, T, heads, width), bounds)


def of_mixers(B, T, heads=8, width=64, dtype=BF16, bounds=None):
    shape = mixers.Shape(B, T, heads, 64, width)
    return mixers.plan_call(shape, CPU, bounds, None, ssd.tiles_for(64, width, dtype)).segments


kinds = pytest.mark.parametrize("cut", [of_cuda, of_operator, of_mixers], ids=lambda f: f.__name__)


@kinds
def test_only_batches_that_do_not_fill_the_gpu_are_cut(cut):
    for batch, whole in ((2, False), (4, False), (32, True), (64, True)):
        found = cut(batch, 2048)
        assert (found.total == found.sequences) == whole, batch


@kinds
@pytest.mark.parametrize(
    ("lengths", "whole"),
    [
        ([3000, 0, 1, 2047] * 20, True),
        ([0, 0], True),
        ([30_000] + [1] * 100, False),  # one sequence would run almost alone
        ([65536 - 32] + [1] * 32, False),
    ],
)
def test_packed_sequences_are_cut_if_one_would_run_almost_alone(cut, lengths, whole):
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    found = cut(1, sum(lengths), bounds=bounds)
    assert found.sequences == len(lengths)
    assert (found.total == found.sequences) == whole


def test_wide_programs_count_by_their_warps():
    """In fp32 and for heads of 128, more warps process a head than in bf16 for heads of 64."""
    for width, dtype, whole in ((64, BF16, False), (64, torch.float32, True), (128, BF16, True)):
        found = of_operator(16, 4096, 8, width, dtype)
        assert (found.total == found.sequences) == whole, (width, dtype)


@pytest.mark.parametrize(
    ("shape", "options", "segments"),
    [
        ((16, 4096), {}, 1),  # 128 blocks of four warps fill 132 multiprocessors
        ((4, 4096, 16, 128), {}, 1),  # as many, two for each head
        ((8, 4096), {}, 8),  # 64 blocks do not
        ((16, 4096), {"warps": 2}, 4),  # nor do 128 blocks of two warps, on other GPUs
        ((16, 65536), {}, 4),  # pass 1 stops early in long segments
        ((24, 65536), {}, 1),
        ((1, 1_000_000), {}, 66),
        # whole rounds of 132, of 8 blocks each; 2,048 tokens have too few segments for one round
        *(((1, T), {}, count) for T, count in ((2048, 11), (8192, 16), (16384, 32), (32768, 32))),
    ],
)
def test_segments_of_the_cuda_kernels_fill_the_gpu(shape, options, segments):
    assert of_cuda(*shape, **options).per_sequence == segments


@pytest.mark.parametrize("lengths", [[1000, 1, 0, 64, 65, 129], [0], [64], [128] * 3])
@pytest.mark.parametrize("tile", [64, 128])
def test_segments_are_cut_into_tiles_as_the_sequences_would_be(lengths, tile):
    bounds = [0, *itertools.accumulate(lengths)]
    segments, tiles = (packed_table(bounds, n, CPU) for n in (3 * 128, tile))
    assert torch.equal(scan_backward.tile_table(segments.table, tile), tiles.table)


@pytest.mark.parametrize(("width", "tile"), [(64, 64), (128, 128)])
def test_the_forward_pass_cuts_where_the_backward_pass_stores_checkpoints(width, tile):
    q = torch.empty(1, 5000, 2, width, dtype=BF16)
    for bounds, count in ((None, None), (None, 7), (torch.tensor([0, 700, 5000]), None)):
        cut = scan_forward.cut_segments(cuda_program(), tuple(q.shape), q.device, bounds, count)
        assert cut.longest % tile == 0
        assert cut.longest == (cut.length or cut.table[:, 2].max())


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_bounds_are_copied_once_for_each_version(monkeypatch):
    copies, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: copies.append(x) or tolist(x))
    bounds, other = (torch.tensor([0, 3, 5]).as_subclass(OnGpu) for _ in range(2))
    assert [host_bounds(bounds) for _ in range(3)] == [(0, 3, 5)] * 3
    assert len(copies) == 1
    bounds[1] = 4
    assert [host_bounds(bounds) for _ in range(3)] == [(0, 4, 5)] * 3
    assert host_bounds(other) == (0, 3, 5)
    assert len(copies) == 3
    bounds.copy_(other)
    assert host_bounds(bounds) == (0, 3, 5)


@pytest.mark.parametrize("inference", [False, True], ids=["memory of NumPy", "inference mode"])
def test_bounds_that_may_change_without_a_new_version_are_read_at_each_call(inference):
    shared = np.array([0, 3, 5])
    with torch.inference_mode(inference):
        bounds = torch.tensor([0, 3, 5]) if inference else torch.from_numpy(shared)
        assert host_bounds(bounds) == (0, 3, 5)
        (bounds if inference else shared)[1] = 4
        assert host_bounds(bounds) == (0, 4, 5)


def test_equal_bounds_share_a_table():
    first, second = packed_table([0, 3, 5], 2, CPU), packed_table((0, 3, 5), 2, CPU)
    assert first.table is second.table
    assert first.table.tolist() == [[0, 0, 2, 1], [0, 2, 1, 2], [1, 3, 2, 3]]
    assert first.first.tolist() == [0, 2, 3]
    assert packed_table([0, 3, 5], 3, CPU).table.tolist() == [[0, 0, 3, 3], [1, 3, 2, 3]]
