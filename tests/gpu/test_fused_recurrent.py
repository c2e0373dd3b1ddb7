"""fused_recurrent_quasar on a GPU against float64: decoding, in place, packed sequences."""

import pytest
import torch
from fla.ops.quasar import fused_recurrent_quasar
from fla.ops.quasar.fused_recurrent import RecurrentTiles, launch_fused_recurrent

from quasar_kernels.reference import quasar_recurrence, relative_rms
from tests.gpu.calls import layer_like, packed
from tests.quasar_kernels.inputs import rows_of_one_tensor
from tests.quasar_kernels.tolerances import RECURRENCE, RECURRENCE_STATE

pytestmark = pytest.mark.gpu


def check(results, expected, dtype):
    (o, state), (wanted, end) = results, expected
    assert relative_rms(o, wanted) <= RECURRENCE[dtype]
    assert relative_rms(state, end) <= RECURRENCE_STATE


WIDTHS = ((8, 64), (3, 32), (2, 128), (1, 48), (2, 256))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "H", "S", "dtype"),
    [
        *((B, 1, 8, 64, dtype) for B in (1, 3, 32, 128) for dtype in RECURRENCE),
        *((2, T, H, S, torch.bfloat16) for T in (1, 2, 77) for H, S in WIDTHS),
        # every choice of tiles
        *((B, 1, 8, S, torch.bfloat16) for B, S in ((8, 128), (32, 128), (64, 128), (256, 64))),
    ],
)
def test_every_shape(B, T, H, S, inplace, dtype):
    inputs = layer_like(T, B=B, H=H, S=S, dtype=dtype)
    state = torch.randn(B, H, S, S, device="cuda")
    before = state.clone()
    expected = quasar_recurrence(*inputs, state)
    o, final = fused_recurrent_quasar(*inputs, state, True, inplace_state=inplace)
    check((o, final), expected, dtype)
    assert (final.data_ptr() == state.data_ptr()) is inplace
    assert inplace or torch.equal(state, before)


@pytest.mark.parametrize(
    "tiles", [RecurrentTiles(*of) for of in ((8, 1), (16, 1), (32, 2), (64, 4))]
)
def test_the_tiles_change_only_the_rounding(tiles):
    inputs = layer_like(5, B=4, dtype=torch.float32)
    state = torch.randn(4, 8, 64, 64, device="cuda")
    expected = quasar_recurrence(*inputs, state)
    check(launch_fused_recurrent(*inputs, state, True, tiles=tiles), expected, torch.float32)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_sequences_in_place(index):
    lengths = [0, 1, 40, 0, 1, 333, 0]
    inputs = layer_like(sum(lengths), dtype=torch.float32)
    state = torch.randn(len(lengths), 8, 64, 64, device="cuda")
    cu = packed(lengths, dtype=index)
    expected = quasar_recurrence(*inputs, state, cu)
    results = fused_recurrent_quasar(*inputs, state, cu_seqlens=cu, inplace_state=True)
    assert results[1].data_ptr() == state.data_ptr()
    check(results, expected, torch.float32)


def test_strided_tokens():
    q, k, v, beta = layer_like(1, B=5)
    views = rows_of_one_tensor(q, k, v)
    state = torch.randn(5, 8, 64, 64, device="cuda")
    expected = fused_recurrent_quasar(q, k, v, beta, state, True)
    found = fused_recurrent_quasar(*views, beta, state, True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_decoding_can_be_captured():
    q, k, v, beta = layer_like(12, B=2)
    state = torch.zeros(2, 8, 64, 64, device="cuda")
    token = [x[:, :1].clone() for x in (q, k, v)]
    fused_recurrent_quasar(*token, beta, state, inplace_state=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = fused_recurrent_quasar(*token, beta, state, inplace_state=True)
    state.zero_()
    steps = []
    for t in range(12):
        for x, whole in zip(token, (q, k, v), strict=True):
            x.copy_(whole[:, t : t + 1])
        graph.replay()
        steps.append(o.clone())
    expected, end = quasar_recurrence(q, k, v, beta)
    check((torch.cat(steps, 1), state), (expected, end), torch.bfloat16)
