"""Bursts of large values: the windows after a burst are as accurate as others, in every head.

A head forgets a burst within several thousand tokens. An error in proportion to the burst that does
not decay with the state is visible in later windows with small values, but not in the error of the
whole sequence.
"""

import pytest
import torch
from fla.ops.quasar import chunk_quasar
from fla.ops.quasar.backend import choose_backend
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.operator_types import ScanInputs

from quasar_kernels.reference import quasar_chunked
from tests.gpu.calls import ON_CUDA_KERNELS, PORTABLE, H, S, both_widths, inputs_of, layer_like

pytestmark = ON_CUDA_KERNELS

WINDOW, LIMIT = 512, 1.2e-2
FACTORS = (1000, 8000, 30_000)
SLOW = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""beta of heads that forget within thousands of tokens, or not at all."""


def with_bursts(v, factors=FACTORS, bursts=20):
    """Return v with ten larger tokens in each of `bursts` places; the factors alternate."""
    v = v.clone()
    for n, start in enumerate(torch.randint(0, v.shape[1] - 10, (bursts,)).tolist()):
        large = v[:, start : start + 10].float() * factors[n % len(factors)]
        v[:, start : start + 10] = large.clamp(-6e4, 6e4)  # the range of fp16
    return v


def window_errors(o, expected):
    """Return the relative RMS error of every full window and head, `[windows, heads]`."""
    T = o.shape[1] // WINDOW * WINDOW
    o, expected = (x[0, :T].double().unflatten(0, (-1, WINDOW)) for x in (o, expected))
    return ((o - expected).square().sum((1, 3)) / expected.square().sum((1, 3))).sqrt()


@pytest.mark.parametrize("beta", [None, SLOW], ids=["layer", "slow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [200_000, 400_000, 1_000_000])
def test_all_windows(T, dtype, beta, monkeypatch):
    q, k, v, own = layer_like(T, dtype=dtype)
    v, beta = with_bursts(v), own if beta is None else torch.tensor(beta, device="cuda")
    expected = quasar_chunked(q, k, v, beta, chunk=128)[0]
    errors = {}
    for name in ("cuda", "triton"):
        monkeypatch.setenv("QUASAR_BACKEND", name)
        assert choose_backend(q, k, v).backend == name
        o = chunk_quasar(q, k, v, beta)[0]
        errors[name] = window_errors(o, expected).amax(0).tolist()
        del o
    assert all(max(found) <= LIMIT for found in errors.values()), errors


@pytest.mark.parametrize("options", [(), PORTABLE], ids=["wgmma", "mma"])
@both_widths
@pytest.mark.parametrize("factor", FACTORS)
def test_all_windows_for_every_width_and_path(factor, width, options):
    q, k, v, beta = inputs_of(50_000, width)
    v = with_bursts(v, (factor,), 6)
    expected = quasar_chunked(q, k, v, beta)[0]
    program = cuda_scan.PROGRAM.load(cuda_scan.variant_of(q, options))
    o = cuda_scan.forward(ScanInputs.of(q, k, v, beta), program=program).o
    assert window_errors(o, expected).max() <= LIMIT


def test_a_forgotten_state_has_no_effect_after_the_next_segment(monkeypatch):
    monkeypatch.setattr(cuda_scan, "LONG", 1 << 40)  # do not skip small maps
    length = 4096
    q, k, v, beta = layer_like(4 * length)
    k, beta = torch.randn_like(k) * 0.15, torch.ones_like(beta)
    plain = cuda_scan.forward(ScanInputs.of(q, k, v, beta), segments=4).saved
    large = torch.full((1, H, S, S), 3e4, device="cuda")
    after = cuda_scan.forward(ScanInputs.of(q, k, v, beta, large), segments=4).saved
    assert plain.segments.length == length
    # after the first map the rounding of fp16 operands remains; the second map removes it
    assert (after.states[0] - plain.states[0]).abs().max() <= 3e4 * 2.0**-20
    assert (after.states[1] - plain.states[1]).abs().max() <= 1e-5
