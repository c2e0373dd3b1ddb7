"""Results of a sequence do not depend, bit for bit, on the other sequences of a call on a CPU."""

from itertools import pairwise

import pytest
import torch
from fla.ops.quasar import chunk_quasar, fused_recurrent_quasar
from fla.ops.quasar import chunk_torch as chunk_torch_module

from tests.quasar_kernels.delta_rule.calls import Inputs, chunk, inputs, recurrent
from tests.quasar_kernels.inputs import packed

LENGTHS = [1, 30, 0, 64, 55]
CALLS = {
    "chunk": lambda x, **options: chunk_quasar(*x[:3], torch.ones(2), **options),
    "recurrent": lambda x, **options: fused_recurrent_quasar(*x[:3], torch.ones(2), **options),
    "delta chunk": lambda x, **options: chunk(x, False, **options),
    "gated chunk": lambda x, **options: chunk(x, True, **options),
    "delta recurrent": lambda x, **options: recurrent(x, False, **options),
    "gated recurrent": lambda x, **options: recurrent(x, True, **options),
}


@pytest.fixture(params=CALLS)
def call(request):
    run = CALLS[request.param]
    return lambda x, **options: run(x, output_final_state=True, **options)


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16])
def dtype(request):
    return request.param


@pytest.mark.parametrize("T", [1, 64, 130])
def test_rows_of_a_batch(monkeypatch, call, dtype, T):
    x = inputs(T, B=5, dtype=dtype)
    o, final = call(x)
    # the length of blocks depends on the number of rows: now of one chunk
    monkeypatch.setattr(chunk_torch_module, "BLOCK_ELEMENTS", 1)
    for n in range(5):
        alone, state = call(Inputs(*(y[n : n + 1] for y in x)))
        assert torch.equal(o[n : n + 1], alone), n
        assert torch.equal(final[n : n + 1], state), n


def test_packed_sequences(call, dtype):
    x, bounds = inputs(sum(LENGTHS), dtype=dtype), packed(LENGTHS)
    o, final = call(x, cu_seqlens=bounds)
    for n, (begin, end) in enumerate(pairwise(bounds.tolist())):
        alone, state = call(Inputs(*(y[:, begin:end] for y in x)))
        assert torch.equal(o[:, begin:end], alone), n
        assert torch.equal(final[n : n + 1], state), n
