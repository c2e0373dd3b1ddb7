"""The host code of the CUDA forward pass without a GPU: launches and options.

test_emulated_forward.py runs it with the kernels; this file checks the rest.
"""

from __future__ import annotations

import pytest
import torch
from fla.ops.quasar.cuda.scan import forward as cuda_scan
from fla.ops.quasar.scan import ScanInputs

from tests.quasar_kernels.cuda.scan.recorder import Recorder

LONG = cuda_scan.LONG
KERNELS = ["segment_map", "segment_scan", "segment_output"]


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    return Recorder(monkeypatch, cuda_scan, KERNELS)


def call(T, heads=2, width=64, bounds=None, **options):
    qkv = (torch.empty(1, T, heads, width, dtype=torch.bfloat16) for _ in range(3))
    return cuda_scan.forward(ScanInputs.of(*qkv, torch.ones(heads), cu_seqlens=bounds), **options)


@pytest.mark.parametrize(
    ("T", "options"),
    [
        (2 * (LONG - 64), {"segments": 2}),
        (3 * LONG + 5, {"bounds": torch.tensor([0, 3 * LONG, 3 * LONG + 5])}),
    ],
)
def test_short_segments_and_packed_sequences_never_stop_early(recorder, T, options):
    call(T, **options)
    assert recorder.names() == KERNELS
    assert all(arguments.stops is None for _, _, arguments in recorder.launches)


def test_long_segments_may_stop_early_and_are_launched_again(recorder):
    call(2 * LONG, segments=2)
    assert recorder.names() == KERNELS * 2
    assert [arguments.repeat for _, _, arguments in recorder.launches] == [0, 0, 0, 1, 1, 1]
    assert all(arguments.stops for _, _, arguments in recorder.launches)


@pytest.mark.parametrize(
    ("heads", "width", "pairs"), [(1, 64, False), (2, 64, True), (3, 64, False), (1, 128, True)]
)
def test_blocks_form_pairs_if_their_number_is_even(recorder, heads, width, pairs):
    call(1000, heads, width)
    alone = () if pairs else ("-DQUASAR_ALONE",)
    assert [v.options for v in recorder.variants] == [(f"-DQUASAR_HEAD={width}", *alone)]
    grids = [blocks for name, (blocks, _), _ in recorder.launches if name != "segment_scan"]
    assert grids
    assert all(blocks % 2 == 0 for blocks in grids) or not pairs
