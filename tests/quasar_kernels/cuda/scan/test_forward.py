"""What the host tells the CUDA kernels, on a machine without a GPU: launches, arguments, copies."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.cuda.program import LoadedProgram, Variant
from fla.ops.quasar.cuda.scan import forward as cuda_scan

LONG = cuda_scan.LONG


class Recorder:
    """Stands in for a loaded program, and keeps the arguments of each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int], cuda_scan.Arguments]] = []
        self.variants: list[Variant] = []

    def kernel(self, name: str) -> SimpleNamespace:
        def launch(grid, parameters, stream) -> None:
            address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
            packed = ctypes.string_at(address, ctypes.sizeof(cuda_scan.Arguments))
            self.launches.append((name, grid, cuda_scan.Arguments.from_buffer_copy(packed)))

        return SimpleNamespace(launch=launch, blocks=4)

    def load(self, variant: Variant) -> LoadedProgram:
        self.variants.append(variant)
        kernels = {f"segment_{name}": self.kernel(name) for name in ("map", "scan", "output")}
        return LoadedProgram(variant, kernels, 132, False)


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(cuda_scan.PROGRAM, "load", recorder.load)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return recorder


def call(T, heads=2, width=64, **options):
    qkv = (torch.empty(1, T, heads, width, dtype=torch.bfloat16) for _ in range(3))
    return cuda_scan.forward(*qkv, torch.ones(heads), **options)


def test_one_segment_needs_no_map(recorder):
    call(63)
    assert [name for name, _, _ in recorder.launches] == ["output"]


def test_short_segments_are_walked_whole(recorder):
    call(2 * (LONG - 64), segments=2)
    assert [name for name, _, _ in recorder.launches] == ["map", "scan", "output"]
    for _, _, arguments in recorder.launches:
        assert arguments.length < LONG
        assert arguments.stops is arguments.unfinished is None
        assert arguments.repeat == 0


def test_long_segments_may_stop_and_are_then_repeated(recorder):
    call(2 * LONG, segments=2)
    names = [name for name, _, _ in recorder.launches]
    assert names == ["map", "scan", "output"] * 2
    assert [arguments.repeat for _, _, arguments in recorder.launches] == [0, 0, 0, 1, 1, 1]
    first, *others = (arguments for _, _, arguments in recorder.launches)
    assert first.T == 2 * LONG
    assert first.length == LONG
    assert len({None, first.stops, first.unfinished}) == 3
    for arguments in others:  # the same tensors, and all but `repeat` as before
        arguments.repeat = 0
        assert bytes(arguments) == bytes(first)


def test_packed_sequences_are_walked_whole(recorder):
    bounds = torch.tensor([0, 3 * LONG, 3 * LONG + 5])
    call(3 * LONG + 5, cu_seqlens=bounds)
    assert [name for name, _, _ in recorder.launches] == ["map", "scan", "output"]
    assert all(arguments.stops is None for _, _, arguments in recorder.launches)


@pytest.mark.parametrize(
    ("heads", "width", "pairs"), [(1, 64, False), (2, 64, True), (3, 64, False), (1, 128, True)]
)
def test_blocks_work_in_pairs_where_their_number_is_even(recorder, heads, width, pairs):
    call(1000, heads, width)
    alone = () if pairs else ("-DQUASAR_ALONE",)
    assert [v.options for v in recorder.variants] == [(f"-DQUASAR_HEAD={width}", *alone)]
    walks = [blocks for name, (blocks, _), _ in recorder.launches if name != "scan"]
    assert walks
    assert all(blocks % 2 == 0 for blocks in walks) or not pairs


def test_tensor_maps_follow_the_kernels_order_and_boxes(monkeypatch):
    asked = []

    def described(*description):
        asked.append(description)
        return b"x"

    monkeypatch.setattr(cuda_scan, "tensor_map", described)
    cuda_scan.tensor_maps.cache_clear()
    strides = tuple((1000 * n, 10 * n, n) for n in (1, 2, 3, 4))  # batch, token, head
    try:
        found = cuda_scan.scan_maps((2, 999, 3, 128), (16, 32, 48, 64), strides)
        assert found == b"xxxxx"
    finally:
        cuda_scan.tensor_maps.cache_clear()
    # q and k by chunks, k, v and o by tiles: the fields of TensorMaps in copies.cuh
    assert [(address, box[2]) for address, _, _, box in asked] == [
        (16, 16),
        (32, 16),
        (32, 64),
        (48, 64),
        (64, 64),
    ]
    for address, sizes, steps, box in asked:
        n = address // 16
        assert sizes == (128, 3, 999, 2)
        assert steps == (n, 10 * n, 1000 * n)
        assert (box[0], box[1], box[3]) == (64, 1, 1)
