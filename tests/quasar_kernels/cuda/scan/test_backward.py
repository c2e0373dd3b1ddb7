"""What the host tells the CUDA kernels of the backward pass, on a machine without a GPU."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.cuda.program import LoadedProgram, Variant
from fla.ops.quasar.cuda.scan import backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import forward as cuda_scan
from fla.ops.quasar.scan import Saved, ScanInputs
from fla.ops.quasar.segments import Segments, packed_table

from tests.quasar_kernels.cuda.scan.recorder import Recorder

KERNELS = [
    "state_checkpoint",
    "state_gradient_map",
    "gradient_scan",
    "state_gradient",
    "input_gradient",
]
"""In the order in which they are launched."""


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    return Recorder(monkeypatch, cuda_scan_bwd, KERNELS)


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
    inputs = ScanInputs.of(*(x[n] for n in ("q", "k", "v", "beta", "initial_state")), scale=0.5)
    saved = Saved(inputs, x["maps"], x["states"], cut)
    found = cuda_scan_bwd.backward(saved, x["d_o"], x["d_final"])
    return x, found


def one_row(T, length):
    count = -(-T // length)
    return Segments(count, 1, count, length, None, None, length)


def test_one_segment_needs_no_map(recorder):
    call(one_row(63, 64), 63)
    assert recorder.names() == ["state_checkpoint", "state_gradient", "input_gradient"]


@pytest.mark.parametrize("width", [64, 128])
def test_every_kernel_gets_the_same_tensors_and_covers_all_tokens(recorder, width):
    T, heads = 1000, 2
    cut = one_row(T, 384)
    given, found = call(cut, T, width, heads, states=True)
    grids = {name: grid for name, grid, _ in recorder.launches}
    assert list(grids) == KERNELS
    walks = (3 * heads * width // 64, 1)  # a block a segment, head and 64 columns
    assert grids["state_checkpoint"] == grids["state_gradient_map"] == walks
    assert grids["state_gradient"] == walks
    assert grids["gradient_scan"] == (heads, width // 8)
    parts = 384 // width  # tiles of as many tokens as a head has channels
    assert grids["input_gradient"] == (3 * parts * heads, 1)
    # `first` is the scan's, and no table is given
    (packed,) = {bytes(arguments) for _, _, arguments in recorder.launches}
    at = cuda_scan_bwd.Arguments.from_buffer_copy(packed)
    for name, x in given.items():
        assert getattr(at, name) == x.data_ptr()
    results = (found.q, found.k, found.v, found.initial_state)
    for name, x in zip(("dq", "dk", "dv", "d_initial"), results, strict=True):
        assert getattr(at, name) == x.data_ptr()
    assert at.table is at.first is None
    pointers = [name for name, kind in at._fields_ if kind is ctypes.c_void_p]
    assert len({getattr(at, name) for name in pointers} - {None}) == 16
    stride = [T * heads * width, heads * width, width]
    strides = (at.q_stride, at.k_stride, at.v_stride, at.o_stride)
    assert [list(of) for of in strides] == [stride] * 4
    sizes = (at.T, at.length, at.per_sequence, at.heads, at.parts, at.scale)
    assert sizes == (T, 384, 3, heads, parts, 0.5)


def test_step_sizes_decays_and_their_gradients_lie_as_they_were_given(recorder):
    T, heads, group = 100, 2, 3
    x = torch.empty(1, T, heads, 64, dtype=torch.bfloat16)
    v = torch.empty(1, T, heads * group, 64, dtype=torch.bfloat16)
    beta = torch.rand(1, T, heads * group) + 0.1
    g = -beta
    saved = Saved(ScanInputs.of(x, x, v, beta, scale=0.5, g=g), None, None, one_row(T, 128))
    found = cuda_scan_bwd.backward(saved, v)
    assert {variant.options[-1] for variant in recorder.variants} == {"-DQUASAR_DECAY"}
    at = recorder.launches[-1].arguments
    assert (at.heads, at.group) == (heads * group, group)
    assert at.decay == g.data_ptr()
    for name, gradient in (("d_beta", found.beta), ("d_decay", found.g)):
        assert gradient.shape == beta.shape
        assert gradient.is_contiguous()
        assert getattr(at, name) == gradient.data_ptr()
    assert found.q.shape == found.k.shape == v.shape  # what each head of v gives


def test_packed_sequences_are_named_by_the_table(recorder):
    bounds = [0, 100, 100, 1000]
    packed = packed_table(bounds, 384, torch.device("cpu"))
    cut = Segments(packed.table.shape[0], 3, 0, 0, *packed)
    call(cut, 1000)
    assert packed.longest == 384
    (*others, (name, grid, at)) = recorder.launches
    assert (name, grid) == ("input_gradient", (5 * 6 * 2, 1))
    assert at.table == packed.table.data_ptr()
    assert all(given.first == packed.first.data_ptr() for _, _, given in others)
    assert at.initial_state is at.d_final is at.d_initial is None


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
    (grid,) = (grid for name, grid, _ in recorder.launches if name == "input_gradient")
    assert grid == ((1563 + 300) * 2, 1)


def test_a_gradient_that_bulk_copies_cannot_read_is_copied(recorder):
    storage = torch.randn(64 * 2 * 64 + 8).bfloat16()
    place = next(n for n in range(8) if (storage.data_ptr() + 2 * n) % 16)
    d_o = storage[place : place + 64 * 2 * 64].view(1, 64, 2, 64)
    call(one_row(64, 64), 64, d_o=d_o)
    addresses = {arguments.d_o for _, _, arguments in recorder.launches}
    assert len(addresses) == 1
    assert addresses.isdisjoint({d_o.data_ptr()})
    assert addresses.pop() % 16 == 0


@pytest.mark.parametrize(("width", "tile"), [(64, 64), (128, 128)])
def test_the_forward_pass_cuts_where_the_backward_pass_keeps_states(width, tile):
    kernel = SimpleNamespace(blocks=4)
    kernels = {"segment_map": kernel, "segment_output": kernel}
    program = LoadedProgram(Variant(0, torch.bfloat16), kernels, 132, False)
    q = torch.empty(1, 5000, 2, width, dtype=torch.bfloat16)
    for bounds, count in ((None, None), (None, 7), (torch.tensor([0, 700, 5000]), None)):
        cut = cuda_scan.cut_segments(program, q, bounds, count)
        assert cut.longest % tile == 0
        assert cut.longest == (cut.length or cut.table[:, 2].max())
