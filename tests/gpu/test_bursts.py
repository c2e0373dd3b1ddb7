"""Bursts of large values: the windows behind them are as accurate as others, head by head.

A head forgets a burst within some thousand tokens. Whatever keeps a trace of it in proportion to
its size, such as a rounding that no map shrinks, shows in the windows where only small values are
left, and nowhere in the error of the whole sequence.
"""

from __future__ import annotations

import pytest
import torch
from fla.ops.quasar import chunk_quasar
from fla.ops.quasar.backend import choose_backend
from fla.ops.quasar.cuda.scan import forward as cuda_scan
from fla.ops.quasar.scan import ScanInputs

from quasar_kernels.reference import quasar_chunked
from tests.gpu.calls import ON_CUDA_KERNELS, PORTABLE, H, S, both_widths, inputs_of, layer_like

pytestmark = ON_CUDA_KERNELS

WINDOW, LIMIT = 512, 1.2e-2
FACTORS = (1000, 8000, 30_000)
SLOW = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""beta of heads that forget in thousands of tokens, or not at all."""


def with_bursts(v, factors=FACTORS, bursts=20):
    """v, but ten tokens in each of `bursts` places are larger, by the factors in turn."""
    v = v.clone()
    for n, start in enumerate(torch.randint(0, v.shape[1] - 10, (bursts,)).tolist()):
        large = v[:, start : start + 10].float() * factors[n % len(factors)]
        v[:, start : start + 10] = large.clamp(-6e4, 6e4)  # what fp16 holds
    return v


def window_errors(o, expected):
    """Relative RMS of every whole window of every head, `[windows, heads]`."""
    T = o.shape[1] // WINDOW * WINDOW
    o, expected = (x[0, :T].double().unflatten(0, (-1, WINDOW)) for x in (o, expected))
    return ((o - expected).square().sum((1, 3)) / expected.square().sum((1, 3))).sqrt()


@pytest.mark.parametrize("beta", [None, SLOW], ids=["layer", "slow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [200_000, 400_000, 1_000_000])
def test_every_window_behind_a_burst(T, dtype, beta, monkeypatch):
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
def test_every_width_and_path(factor, width, options):
    q, k, v, beta = inputs_of(50_000, width)
    v = with_bursts(v, (factor,), 6)
    expected = quasar_chunked(q, k, v, beta)[0]
    program = cuda_scan.PROGRAM.load(cuda_scan.variant_of(q, options))
    o = cuda_scan.forward(ScanInputs.of(q, k, v, beta), program=program).o
    assert window_errors(o, expected).max() <= LIMIT


def test_a_state_that_is_forgotten_leaves_no_trace_behind_the_next_segment(monkeypatch):
    monkeypatch.setattr(cuda_scan, "LONG", 1 << 40)  # maps are kept, however small
    length = 4096
    q, k, v, beta = layer_like(4 * length)
    k, beta = torch.randn_like(k) * 0.15, torch.ones_like(beta)
    plain = cuda_scan.forward(ScanInputs.of(q, k, v, beta), segments=4).saved
    large = torch.full((1, H, S, S), 3e4, device="cuda")
    after = cuda_scan.forward(ScanInputs.of(q, k, v, beta, large), segments=4).saved
    assert plain.segments.length == length
    # the first map brings it down to what fp16 operands leave; the second one removes that, too
    assert (after.states[0] - plain.states[0]).abs().max() <= 3e4 * 2.0**-20
    assert (after.states[1] - plain.states[1]).abs().max() <= 1e-5
