"""The host code of the CUDA backward pass without a GPU: how calls are cut into tiles.

test_emulated_backward.py runs it with the kernels; this file checks the rest.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.cuda.program import LoadedProgram, Variant
from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.segments import packed_table


@pytest.mark.parametrize("lengths", [[1000, 1, 0, 64, 65, 129], [0], [64], [128] * 3])
@pytest.mark.parametrize("tile", [64, 128])
def test_segments_are_cut_into_tiles_as_the_sequences_would_be(lengths, tile):
    bounds = [0, *itertools.accumulate(lengths)]
    segments, tiles = (packed_table(bounds, n, torch.device("cpu")) for n in (3 * 128, tile))
    assert torch.equal(cuda_scan_bwd.tile_table(segments.table, tile), tiles.table)


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
