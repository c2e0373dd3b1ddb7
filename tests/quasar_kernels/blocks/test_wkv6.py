"""WKV6: fla's definition, strong decays, and errors."""

import pytest
import torch
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

from quasar_kernels.blocks.wkv6 import wkv6
from quasar_kernels.decay_reference import wkv6_recurrence
from tests.quasar_kernels.blocks.calls import wkv6_inputs
from tests.quasar_kernels.float64 import check
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import OPERATOR

LIMIT = OPERATOR[torch.float32]


def test_the_definition_equals_fla_s():
    x = wkv6_inputs(9, B=2)
    state = torch.randn(2, 2, 16, 24)
    r, k, v, w, u = x
    turned = (y.transpose(1, 2) for y in (r, k, v, w))
    o, final = naive_recurrent_rwkv6(*turned, u, 1.0, state, True)
    check((o.transpose(1, 2), final), wkv6_recurrence(*x, state), 1e-6)


def test_strong_decays_do_not_reduce_the_precision_of_neighbours():
    r, k, v, w, u = wkv6_inputs(128, decay=0.01)
    w[:, 5::20] = -1e6
    check(wkv6(r, k, v, w, u), wkv6_recurrence(r, k, v, w, u), LIMIT)
    w[:, 50] = float("-inf")
    o, _ = wkv6(r, k, v, w, u)
    alone, _ = wkv6(*(y[:, 50:] for y in (r, k, v, w)), u)
    assert torch.isfinite(o).all()
    check([o[:, 51:]], [alone[:, 1:]], LIMIT)


def test_invalid_arguments():
    r, k, v, w, u = wkv6_inputs(10, B=2)
    for arguments, words in (
        ((r[0], k, v, w, u), r"r must have shape \[B, T, H, K\]"),
        ((r, k[:, 1:], v, w, u), "k must have shape"),
        ((r, k, v[:, 1:], w, u), "v must have shape"),
        ((r, k, v, w[..., :1], u), "w must have shape"),
        ((r, k, v, w, u[:1]), "u must have shape"),
        ((r, k, v, w, u, torch.zeros(1, 2, 16, 24)), "one state per sequence"),
        ((r, k, v, w, u, None, packed([10])), "B must be 1"),
        ((r[:1], k[:1], v[:1], w[:1], u, None, packed([9])), "must rise from 0 to T = 10"),
    ):
        with pytest.raises(ValueError, match=words):
            wkv6(*arguments)
