"""States after every n tokens on a GPU: those of the prefixes' own calls, in one pass."""

from itertools import pairwise

import pytest
import torch
from fla.ops.quasar import checkpoints

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.delta_rule.calls import Inputs, chunk, inputs
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import OPERATOR

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.mark.parametrize("lengths", [[20_000], [1, 512, 0, 3000, 128]], ids=str)
@pytest.mark.parametrize("every", [128, 1024])
@pytest.mark.parametrize(("K", "dtype"), [(64, BF16), (128, BF16), (48, BF16), (64, torch.float32)])
def test_states_after_every_n_tokens(monkeypatch, K, dtype, every, lengths):
    x = inputs(sum(lengths), K=K, dtype=dtype, device="cuda")
    bounds, state = packed(lengths, "cuda"), torch.randn(len(lengths), 2, K, K, device="cuda")
    monkeypatch.setattr(checkpoints, "_by_parts", None)  # one pass
    options = {"cu_seqlens": bounds, "initial_state": state, "output_final_state": True}
    o, final, found = chunk(x, True, checkpoint_every=every, **options)
    plain, plain_final = chunk(x, True, **options)
    assert relative_rms(o, plain) <= OPERATOR[dtype]
    assert relative_rms(final, plain_final) <= OPERATOR[dtype]
    place = 0
    for n, (start, stop) in enumerate(pairwise(bounds.tolist())):
        for end in range(start + every, stop + 1, every):
            prefix = Inputs(*(y[:, start:end] for y in x))
            wanted = chunk(prefix, True, initial_state=state[n : n + 1], output_final_state=True)[1]
            error = relative_rms(found[:, place], wanted)
            assert error <= OPERATOR[dtype], (n, end, error)
            place += 1
    assert place == found.shape[1]
