"""The CUDA kernels of the backward pass, emulated on a CPU: every gradient.

G and the states of the forward pass are computed in float64, so that its errors do not count.
"""

import math

import pytest
import torch
from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd
from fla.ops.quasar.operator_types import Saved

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.cuda.emulated.programs import EMULATED
from tests.quasar_kernels.cuda.scan.calls import OWN, READ, cut_by, draw, exact, exact_maps
from tests.quasar_kernels.tolerances import BETA_GRADIENT, GRADIENT

pytestmark = EMULATED

SCALE, LENGTH = 0.5, 128


def assert_gradients(programs, x, to_state=True, loss_of_last=None):
    """Compare all gradients with float64; they must not depend on when copies arrive.

    With `loss_of_last`, only the last token has a loss, of that size. The gradients of v are then
    also compared for every 64 tokens, because those of early tokens are small.
    """
    cut = cut_by(x, LENGTH)
    G = states = None
    if cut.total > cut.sequences:
        maps = exact_maps(x, cut)
        G, states = maps.G.float(), maps.states.float()
    leaves = {name: y.double().requires_grad_() for name, y in x.leaves().items()}
    o, final = exact(x._replace(**leaves), SCALE)
    d_o = torch.randn_like(x.v)
    if loss_of_last:
        d_o[:, :-1] = 0
        d_o *= loss_of_last
    d_final = torch.randn(final.shape) if to_state else torch.zeros(final.shape)
    expected = torch.autograd.grad((o, final), [*leaves.values()], (d_o.double(), d_final.double()))
    results = [
        cuda_scan_bwd.backward(
            Saved(x.inputs(SCALE), G, states, cut),
            d_o,
            d_final if to_state else None,
            program=x.load(programs, cuda_scan_bwd.PROGRAM, late),
        )
        for late in (False, True)
    ]
    for name, exact_gradient in zip(leaves, expected, strict=True):
        gradient, late_gradient = (getattr(result, name) for result in results)
        assert torch.equal(gradient, late_gradient), name
        if name in "qk":
            gradient = gradient.double().unflatten(2, (x.q.shape[2], -1)).sum(3)
        if name == "beta" and x.q.dtype == torch.float16:  # zero for steps of zero (gate.divisible)
            exact_gradient = torch.where(x.beta == 0, 0.0, exact_gradient)
        sums = name == "beta" and x.beta.ndim == 1
        limit = BETA_GRADIENT if sums else GRADIENT[x.q.dtype]
        assert relative_rms(gradient, exact_gradient) <= limit, name
        if loss_of_last and name == "v":
            windows = zip(gradient.split(64, 1), exact_gradient.split(64, 1), strict=True)
            errors = [relative_rms(*pair) for pair in windows if pair[1].abs().max() > 2.0**-100]
            assert len(errors) > 2, errors  # two are in the last segment
            assert max(errors) <= limit, errors


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.bfloat16) for kind in (OWN, READ, 0.0, 0.02, 30.0)),
        *((kind, torch.float16) for kind in (READ, 0.02)),
    ],
)
def test_gradients(programs, kind, dtype):
    B = 2 if kind == OWN else 1
    assert_gradients(programs, draw(kind, 280, B=B, dtype=dtype))  # ends within a chunk


@pytest.mark.parametrize("kind", [READ, 0.02])
def test_gradients_of_heads_that_share_keys(programs, kind):
    assert_gradients(programs, draw(kind, 280, group=3))


@pytest.mark.parametrize("least", [1, 1 << 40])
def test_gradients_with_total_decay_at_some_tokens(programs, monkeypatch, least):
    monkeypatch.setattr(cuda_scan_bwd, "LONG", least)
    x = draw(0.02, 330)
    total = torch.rand_like(x.g) < 0.1
    assert_gradients(programs, x._replace(g=torch.where(total, -100.0, x.g)))


@pytest.mark.parametrize("bits", [20, 110])
def test_gradients_reach_early_segments_through_decays(programs, monkeypatch, bits):
    monkeypatch.setattr(cuda_scan_bwd, "LONG", LENGTH)
    x = draw(0.0, 3 * LENGTH)._replace(initial_state=None)
    x = x._replace(g=torch.full_like(x.g, -bits * math.log(2) / LENGTH))
    assert_gradients(programs, x, to_state=False, loss_of_last=2.0**60)


@pytest.mark.parametrize("kind", [OWN, READ, 0.02])
def test_gradients_of_packed_sequences(programs, kind):
    assert_gradients(programs, draw(kind, [150, 0, 5, 64, 300]))


def test_gradients_of_packed_sequences_that_are_not_cut(programs):
    assert_gradients(programs, draw(0.02, [64, 0, 5, 100]))


@pytest.mark.parametrize("kind", [OWN, READ, 0.02])
def test_gradients_of_one_segment_without_states(programs, kind):
    x = draw(kind, 100)._replace(initial_state=None)
    assert_gradients(programs, x, to_state=False)
