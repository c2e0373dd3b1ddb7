"""The host code of the CUDA backward pass without a GPU: grids, tiles, alignment.

test_emulated_backward.py runs it with the kernels; this file checks the rest.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.cuda.program import LoadedProgram, Variant
from fla.ops.quasar.cuda.scan import backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import forward as cuda_scan
from fla.ops.quasar.scan import Saved, ScanInputs
from fla.ops.quasar.segments import Segments, packed_table

from tests.quasar_kernels.cuda.scan.recorder import LaunchLog

KERNELS = [
    "state_checkpoint",
    "state_gradient_map",
    "gradient_scan",
    "state_gradient",
    "input_gradient",
]
"""In the order in which they are launched."""


@pytest.fixture
def recorder(monkeypatch) -> LaunchLog:
    return LaunchLog(monkeypatch, cuda_scan_bwd, KERNELS)


def call(cut, T, width=64, heads=2, d_o=None):
    """Run `backward` on one row of T tokens."""
    q, k, v = (torch.empty(1, T, heads, width, dtype=torch.bfloat16) for _ in range(3))
    G = torch.empty(cut.total, heads, width, width) if cut.total > cut.sequences else None
    saved = Saved(ScanInputs.of(q, k, v, torch.ones(heads)), G, G, cut)
    cuda_scan_bwd.backward(saved, torch.empty_like(v) if d_o is None else d_o)


def one_row(T, length):
    count = -(-T // length)
    return Segments(count, 1, count, length, None, None, length)


def test_the_grids_cover_wide_heads(recorder):
    """The kernels of heads of 128 need Hopper, so they are not emulated."""
    call(one_row(1000, 384), 1000, width=128)
    grids = {name: grid for name, grid, _ in recorder.launches}
    assert list(grids) == KERNELS
    passes = (3 * 2 * 2, 1)  # a block for each segment, head and 64 columns
    assert grids["state_checkpoint"] == grids["state_gradient_map"] == passes
    assert grids["state_gradient"] == passes
    assert grids["gradient_scan"] == (2, 16)
    assert grids["input_gradient"] == (3 * 3 * 2, 1)  # a block for each tile of 128 tokens and head


@pytest.mark.parametrize("lengths", [[1000, 1, 0, 64, 65, 129], [0], [64], [128] * 3])
@pytest.mark.parametrize("tile", [64, 128])
def test_segments_are_cut_into_tiles_as_the_sequences_would_be(lengths, tile):
    bounds = [0, *itertools.accumulate(lengths)]
    segments, tiles = (packed_table(bounds, n, torch.device("cpu")) for n in (3 * 128, tile))
    assert torch.equal(cuda_scan_bwd.tile_table(segments.table, tile), tiles.table)


def test_one_long_sequence_among_short_ones_leaves_no_tiles_empty(recorder):
    bounds = [0, 100_000, *range(100_001, 100_301)]
    packed = packed_table(bounds, 6400, torch.device("cpu"))
    cut = Segments(packed.table.shape[0], 301, 0, 0, *packed)
    call(cut, bounds[-1])
    (grid,) = (grid for name, grid, _ in recorder.launches if name == "input_gradient")
    assert grid == ((1563 + 300) * 2, 1)


def test_an_unaligned_gradient_is_copied(recorder):
    storage = torch.randn(64 * 2 * 64 + 8).bfloat16()
    place = next(n for n in range(8) if (storage.data_ptr() + 2 * n) % 16)
    d_o = storage[place : place + 64 * 2 * 64].view(1, 64, 2, 64)
    call(one_row(64, 64), 64, d_o=d_o)
    (address,) = {arguments.d_o for _, _, arguments in recorder.launches}
    assert address != d_o.data_ptr()
    assert address % 16 == 0


@pytest.mark.parametrize(("width", "tile"), [(64, 64), (128, 128)])
def test_the_forward_pass_cuts_where_the_backward_pass_stores_checkpoints(width, tile):
    kernel = SimpleNamespace(blocks=4, threads=128)
    kernels = {"segment_map": kernel, "segment_output": kernel}
    program = LoadedProgram(Variant(0, torch.bfloat16), kernels, 132, False)
    q = torch.empty(1, 5000, 2, width, dtype=torch.bfloat16)
    for bounds, count in ((None, None), (None, 7), (torch.tensor([0, 700, 5000]), None)):
        cut = cuda_scan.cut_segments(program, q, bounds, count)
        assert cut.longest % tile == 0
        assert cut.longest == (cut.length or cut.table[:, 2].max())
