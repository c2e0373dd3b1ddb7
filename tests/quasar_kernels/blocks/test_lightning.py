"""Lightning attention against the recurrence in float64."""

import inspect
import re

import pytest
import torch
from fla.ops import lightning_attn as fla_lightning

from quasar_kernels.blocks import lightning
from quasar_kernels.decay_reference import run_recurrence
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import GRADIENT

NAMES = ["chunk_lightning_attn", "fused_recurrent_lightning_attn"]
functions = pytest.mark.parametrize("name", NAMES)


def drawn(T, B=1, H=3, K=16, V=24):
    return *torch.randn(2, B, T, H, K), torch.randn(B, T, H, V)


def expected(q, k, v, state, bounds=None, layer=1, layers=4, scale=0.25):
    """Compute the recurrence token by token."""
    H = q.shape[2]
    decays = torch.exp(-(8 / H) * (1 - layer / layers) * torch.arange(H, dtype=q.dtype))

    def step(t, S):
        S = decays[:, None, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        return scale * (q[:, t, :, :, None] * S).sum(-2), S

    return run_recurrence(step, k.shape, v.shape[-1], state, bounds, q)


@functions
@pytest.mark.parametrize(("T", "bounds"), [(1, None), (90, None), (90, [0, 1, 40, 0, 49])])
def test_results_and_gradients_match_float64(name, T, bounds):
    cu = None if bounds is None else packed(bounds)
    state = torch.randn(1 if bounds is None else len(bounds), 3, 16, 24)

    def run(q, k, v, state):
        options = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu}
        return getattr(lightning, name)(q, k, v, 1, 4, **options)

    def exact(q, k, v, state):
        return expected(q, k, v, state, cu)

    check(*with_float64(run, exact, *drawn(T), state), GRADIENT[torch.float32])


@pytest.mark.parametrize("bounds", [None, [0, 20, 1, 19]])
def test_in_reverse_order(bounds):
    q, k, v = drawn(40)
    lengths = bounds or [40]
    state = torch.randn(len(lengths), 3, 16, 24)
    o, final = lightning.fused_recurrent_lightning_attn(
        q, k, v, 0, 2, 0.5, state, True, reverse=True, cu_seqlens=bounds and packed(bounds)
    )
    parts = [x.split(lengths, 1) for x in (q, k, v)]
    for n, (*x, found) in enumerate(zip(*parts, o.split(lengths, 1), strict=True)):
        wide = (y.double().flip(1) for y in x)
        wanted, end = expected(*wide, state[n : n + 1].double(), None, 0, 2, 0.5)
        check((found, final[n : n + 1]), (wanted.flip(1), end), 1e-6)


@functions
def test_signatures_and_errors(name):
    function = getattr(lightning, name)
    found, wanted = (
        {x.name: x.default for x in inspect.signature(f).parameters.values()}
        for f in (function, getattr(fla_lightning, name))
    )
    assert found == wanted
    q, k, v = drawn(5)
    for arguments, words in (
        ((q, k[..., 1:], v, 0, 2), "k, like q, must have shape"),
        ((q, k, v[:, 1:], 0, 2), "v must have shape [1, 5, 3, V]"),
        ((q, k, v, 2, 2), "layer_idx must be from 0 to 1; got 2"),
        ((q, k, v, 0, 0), "num_layers must be a whole number from 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            function(*arguments)
