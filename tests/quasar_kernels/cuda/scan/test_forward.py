"""The host code of the CUDA forward pass without a GPU: launches, options, tensor maps.

test_emulated_forward.py runs it with the kernels; this file checks the rest.
"""

from __future__ import annotations

import pytest
import torch
from fla.ops.quasar.cuda.scan import backward as cuda_scan_bwd
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


# tensor, strides and rows of a box, for each field of TensorMaps (copies.cuh) and GradientMaps
SCAN = [(1, 1, 16), (2, 2, 16), (2, 2, 64), (3, 3, 64), (4, 4, 64)]  # q, k by chunks; k, v, o
GRADIENTS = [(n, min(n, 4), 64) for n in range(1, 9)]  # all results have d_o's strides


@pytest.mark.parametrize(
    ("describe", "tensors", "maps"),
    [(cuda_scan.scan_maps, 4, SCAN), (cuda_scan_bwd.gradient_maps, 8, GRADIENTS)],
    ids=["forward", "backward"],
)
def test_tensor_maps_have_the_kernels_order_and_boxes(monkeypatch, describe, tensors, maps):
    calls = []
    monkeypatch.setattr(cuda_scan, "tensor_map", lambda *x: calls.append(x) or b"x")
    cuda_scan.tensor_maps.cache_clear()
    strides = tuple((1000 * n, 10 * n, n) for n in (1, 2, 3, 4))  # batch, token, head
    addresses = tuple(16 * n for n in range(1, tensors + 1))
    try:
        assert describe((2, 999, 6, 128), 2, addresses, strides) == b"x" * len(maps)
    finally:
        cuda_scan.tensor_maps.cache_clear()
    assert calls == [
        # q and k, the first two, have half as many heads
        (
            16 * tensor,
            (128, 3 if tensor < 3 else 6, 999, 2),
            (n, 10 * n, 1000 * n),
            (64, 1, rows, 1),
        )
        for tensor, n, rows in maps
    ]
