"""What the host tells the CUDA kernels of the backward pass, on a machine without a GPU."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.cuda.scan import backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import forward as cuda_scan
from fla.ops.quasar.segments import Segments, packed_table

NAMES = [
    "q",
    "k",
    "v",
    "d_o",
    "dq",
    "dk",
    "dv",
    "checkpoints",
    "beta",
    "initial_state",
    "d_final",
    "maps",
    "states",
    "d_states",
    "d_initial",
    "d_beta",
    "table",
    "first",
]
"""The addresses of GradientArguments in csrc/gradients.cuh, in their order."""


class Recorder:
    """Stands in for a loaded program, and keeps the arguments of each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int], tuple]] = []

    def load(self, key, options=()):
        def kernel(name: str) -> SimpleNamespace:
            def launch(grid, parameters, stream) -> None:
                address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
                packed = ctypes.string_at(address, cuda_scan_bwd.ARGUMENTS.size)
                self.launches.append((name, grid, cuda_scan_bwd.ARGUMENTS.unpack(packed)))

            return SimpleNamespace(launch=launch)

        names = ("checkpoint", "map", "scan", "state", "input")
        return cuda_scan_bwd._Program(*map(kernel, names), False)


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(cuda_scan_bwd, "load_program", recorder.load)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return recorder


def call(cut, T, width=64, heads=2, states=False, d_o=None):
    """Run `backward` on one row of T tokens and return the inputs by name, and the gradients."""
    x = {n: torch.empty(1, T, heads, width, dtype=torch.bfloat16) for n in ("q", "k", "v", "d_o")}
    x["d_o"] = x["d_o"] if d_o is None else d_o
    x["beta"] = torch.ones(heads)
    for n, of in (
        ("maps", cut.total),
        ("initial_state", cut.sequences),
        ("d_final", cut.sequences),
    ):
        there = cut.total > cut.sequences if n == "maps" else states
        x[n] = torch.empty(of, heads, width, width) if there else None
    x["states"] = None if x["maps"] is None else torch.empty_like(x["maps"])
    found = cuda_scan_bwd.backward(
        *(x[n] for n in ("q", "k", "v", "beta", "initial_state", "maps", "states", "d_o")),
        x["d_final"], 0.5, cut,
    )  # fmt: skip
    return x, found


def one_row(T, length):
    count = -(-T // length)
    return Segments(count, 1, count, length, None, None, length)


def test_one_segment_needs_no_map(recorder):
    call(one_row(63, 64), 63)
    assert [name for name, _, _ in recorder.launches] == ["checkpoint", "state", "input"]


@pytest.mark.parametrize("width", [64, 128])
def test_every_kernel_gets_the_same_tensors_and_covers_all_tokens(recorder, width):
    T, heads = 1000, 2
    cut = one_row(T, 384)
    given, found = call(cut, T, width, heads, states=True)
    grids = {name: grid for name, grid, _ in recorder.launches}
    assert list(grids) == ["checkpoint", "map", "scan", "state", "input"]
    walks = (3 * heads * width // 64, 1)  # a block a segment, head and 64 columns
    assert grids["checkpoint"] == grids["map"] == grids["state"] == walks
    assert grids["scan"] == (heads, width // 8)
    parts = 384 // width  # tiles of as many tokens as a head has channels
    assert grids["input"] == (3 * parts * heads, 1)
    # `first` is the scan's, and no table is given
    (arguments,) = {arguments for _, _, arguments in recorder.launches}
    at = dict(zip(NAMES, arguments, strict=False))
    for name, x in given.items():
        assert at[name] == x.data_ptr()
    results = (found.q, found.k, found.v, found.initial_state)
    for name, x in zip(("dq", "dk", "dv", "d_initial"), results, strict=True):
        assert at[name] == x.data_ptr()
    assert at["table"] == at["first"] == 0
    assert len({x for x in at.values() if x}) == 16
    stride = (T * heads * width, heads * width, width)
    assert arguments[18:] == (T, 384, *stride * 4, 3, heads, parts, 0.5)


def test_packed_sequences_are_named_by_the_table(recorder):
    bounds = [0, 100, 100, 1000]
    packed = packed_table(bounds, 384, torch.device("cpu"))
    cut = Segments(packed.table.shape[0], 3, 0, 0, *packed)
    call(cut, 1000)
    assert packed.longest == 384
    ((_, grid, arguments),) = [x for x in recorder.launches if x[0] == "input"]
    assert grid == (5 * 6 * 2, 1)
    at = dict(zip(NAMES, arguments, strict=False))
    assert at["table"] == packed.table.data_ptr()
    assert all(x[17] == packed.first.data_ptr() for n, _, x in recorder.launches if n != "input")
    assert at["initial_state"] == at["d_final"] == at["d_initial"] == 0


@pytest.mark.parametrize("lengths", [[1000, 1, 0, 64, 65, 129], [0], [64], [128] * 3, [5000, 3]])
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
    (grid,) = (grid for name, grid, _ in recorder.launches if name == "input")
    assert grid == ((1563 + 300) * 2, 1)


def test_a_gradient_that_bulk_copies_cannot_read_is_copied(recorder):
    storage = torch.randn(64 * 2 * 64 + 8).bfloat16()
    place = next(n for n in range(8) if (storage.data_ptr() + 2 * n) % 16)
    d_o = storage[place : place + 64 * 2 * 64].view(1, 64, 2, 64)
    call(one_row(64, 64), 64, d_o=d_o)
    addresses = {arguments[3] for _, _, arguments in recorder.launches}
    assert len(addresses) == 1
    assert addresses.isdisjoint({d_o.data_ptr()})
    assert addresses.pop() % 16 == 0


def test_tensor_maps_follow_the_kernels_order_and_boxes(monkeypatch):
    asked = []
    monkeypatch.setattr(cuda_scan_bwd, "tensor_map", lambda *x: asked.append(x) or b"x")
    cuda_scan_bwd._tensor_maps.cache_clear()
    strides = tuple((1000 * n, 10 * n, n) for n in range(1, 9))  # batch, token, head
    try:
        made = cuda_scan_bwd._tensor_maps((2, 999, 3, 128), tuple(range(16, 144, 16)), strides)
    finally:
        cuda_scan_bwd._tensor_maps.cache_clear()
    assert made == b"x" * 8
    for n, (address, sizes, steps, box) in enumerate(asked, 1):
        assert address == 16 * n
        assert sizes == (128, 3, 999, 2)
        assert steps == (n, 10 * n, 1000 * n)
        assert box == (64, 1, 64, 1)


@pytest.mark.parametrize(("width", "tile"), [(64, 64), (128, 128)])
def test_the_forward_pass_cuts_where_the_backward_pass_keeps_states(width, tile):
    kernel = SimpleNamespace(blocks=4)
    program = cuda_scan._Program(kernel, kernel, kernel, 132, False)
    q = torch.empty(1, 5000, 2, width, dtype=torch.bfloat16)
    for bounds, count in ((None, None), (None, 7), (torch.tensor([0, 700, 5000]), None)):
        cut = cuda_scan.cut_segments(program, q, bounds, count)
        assert cut.longest % tile == 0
        assert cut.longest == (cut.length or cut.table[:, 2].max())
