"""The CUDA C++ backward pass on a GPU: accuracy against float64, semantics, determinism."""

import pytest
import torch
from fla.ops.quasar import chunk_quasar
from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.operator_types import ScanInputs

from quasar_kernels.reference import relative_rms
from tests.gpu.calls import (
    CHANNELS,
    ON_CUDA_KERNELS,
    PORTABLE,
    both_widths,
    gradients,
    inputs_of,
    layer_like,
    packed,
)
from tests.quasar_kernels.inputs import ADVERSARIAL_KEYS, common_key, rows_of_one_tensor
from tests.quasar_kernels.tolerances import BETA_GRADIENT, GRADIENT

pytestmark = [*ON_CUDA_KERNELS, pytest.mark.usefixtures("on_cuda")]

LIMIT = GRADIENT[torch.bfloat16]


@pytest.fixture
def on_cuda(monkeypatch):
    """Forbid other backends, and check that the CUDA kernels computed gradients."""
    monkeypatch.setenv("QUASAR_BACKEND", "cuda")
    backward = cuda_scan_bwd.backward
    calls = []
    monkeypatch.setattr(
        cuda_scan_bwd, "backward", lambda *a, **kw: calls.append(1) or backward(*a, **kw)
    )
    yield
    assert calls, "no gradient was computed by the CUDA kernels"


def assert_near(found, exact):
    """Assert that every gradient is finite and close to float64's."""
    for n, (x, wanted) in enumerate(zip(found, exact, strict=True)):
        assert torch.isfinite(x).all()
        assert relative_rms(x, wanted) <= (BETA_GRADIENT if n == 3 else LIMIT), "qkvbs"[n]


@both_widths
@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 127, 129, 512, 1000, 4096, 65_537])
def test_gradients_match_float64(T, width):
    inputs = inputs_of(T, width)
    d_o = torch.randn_like(inputs[0])
    assert_near(gradients(inputs, d_o), gradients(inputs, d_o, exact=True))


@both_widths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("B", "heads"), [(1, 8), (2, 3), (5, 1)])
def test_every_dtype_batch_and_head_count_with_states(dtype, B, heads, width):
    inputs = layer_like(333, B=B, H=heads, S=width, dtype=dtype)
    initial, d_final = torch.randn(2, B, heads, width, width, device="cuda")
    call = inputs, torch.randn_like(inputs[0]), initial, d_final, None, 0.7
    assert_near(gradients(*call), gradients(*call, exact=True))


@both_widths
@pytest.mark.parametrize(
    "lengths", [[0, 1, 700, 0, 64, 5000, 65, 0], [5], [16] * 50, [128, 256], [9001, *[1] * 300]]
)
def test_packed_sequences(lengths, width):
    inputs = inputs_of(sum(lengths), width)
    shape = len(lengths), CHANNELS // width, width, width
    initial, d_final = torch.randn(2, *shape, device="cuda")
    cu = packed(lengths)
    call = inputs, torch.randn_like(inputs[0]), initial, d_final, cu
    assert_near(gradients(*call), gradients(*call, exact=True))


@both_widths
def test_packed_sequences_are_independent(width):
    bounds = [0, 700, 765, 9765, 9770]
    *qkv, beta = inputs_of(bounds[-1], width)
    d_o = torch.randn_like(qkv[0])
    cu = torch.tensor(bounds, device="cuda")
    clean = gradients((*qkv, beta), d_o, cu=cu)
    for x in (*qkv, d_o):
        x[:, bounds[1] : bounds[2]] = float("nan")
    poisoned = gradients((*qkv, beta), d_o, cu=cu)
    for n in (0, 2, 3):
        rows = slice(bounds[n], bounds[n + 1])
        for x, wanted in zip(poisoned[:3], clean[:3], strict=True):
            assert torch.equal(x[:, rows], wanted[:, rows])


@both_widths
def test_the_number_of_segments_changes_only_the_rounding(width):
    q, k, v, beta = inputs_of(6000, width)
    d_o = torch.randn_like(q)
    exact = gradients((q, k, v, beta), d_o, exact=True)
    for n in (1, 2, 7, 40):
        _, _, saved = cuda_scan.forward(ScanInputs.of(q, k, v, beta), segments=n)
        found = cuda_scan_bwd.backward(saved, d_o)
        assert_near(found[:4], exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_without_wgmma(dtype):
    q, k, v, beta = inputs_of(3001, 64, dtype=dtype)
    d_o = torch.randn_like(q)
    variant = cuda_scan.variant_of(q, PORTABLE)
    program = cuda_scan.PROGRAM.load(variant)
    _, _, saved = cuda_scan.forward(ScanInputs.of(q, k, v, beta), program=program)
    program = cuda_scan_bwd.PROGRAM.load(variant)
    found = cuda_scan_bwd.backward(saved, d_o, program=program)
    assert_near(found[:4], gradients((q, k, v, beta), d_o, exact=True))


@both_widths
@pytest.mark.parametrize("keys", ADVERSARIAL_KEYS)
def test_no_less_accurate_than_triton_on_adversarial_keys(keys, width, monkeypatch):
    q, k, v, beta = inputs_of(3000, width)
    inputs = q, ADVERSARIAL_KEYS[keys](k), v, beta
    d_o = torch.randn_like(q)
    found = gradients(inputs, d_o)
    exact = gradients(inputs, d_o, exact=True)
    monkeypatch.setenv("QUASAR_BACKEND", "triton")
    triton = gradients(inputs, d_o)
    for x, other, wanted in zip(found[:3], triton[:3], exact[:3], strict=True):
        assert torch.isfinite(x).all()
        assert relative_rms(x, wanted) <= max(LIMIT, 1.2 * relative_rms(other, wanted))


@both_widths
@pytest.mark.parametrize("noise", [0.1, 0.01])
def test_correlated_keys(noise, width):
    q, k, v, beta = inputs_of(5000, width)
    inputs = q, common_key(k, noise), v, beta
    d_o = torch.randn_like(q)
    # such long keys overwrite the state for any beta, so beta's gradient almost vanishes
    assert_near(gradients(inputs, d_o)[:3], gradients(inputs, d_o, exact=True)[:3])


@both_widths
@pytest.mark.parametrize("where", ["v", "d_o"])
def test_bursts(where, width):
    q, k, v, beta = inputs_of(4000, width)
    d_o = torch.randn_like(q)
    burst = v if where == "v" else d_o
    burst[:, 1995:2005] *= 30_000
    inputs = q, k, v, beta
    assert_near(gradients(inputs, d_o), gradients(inputs, d_o, exact=True))


@both_widths
def test_reruns_are_bitwise_equal_and_inputs_do_not_change(width):
    inputs = inputs_of(70_000, width)
    d_o = torch.randn_like(inputs[0])
    copies = [x.clone() for x in (*inputs, d_o)]
    first, second = (gradients(inputs, d_o) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(torch.equal(x, c) for x, c in zip((*inputs, d_o), copies, strict=True))


@both_widths
def test_strided_inputs_and_an_unaligned_gradient(width):
    q, k, v, beta = inputs_of(900, width)
    views = rows_of_one_tensor(q, k, v)
    storage = torch.randn(q.numel() + 1, device="cuda").bfloat16()
    d_o = storage[1:].view_as(q)  # not aligned to 16 bytes
    found = gradients((*views, beta), d_o)
    expected = gradients((q, k, v, beta), d_o.clone())
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@both_widths
def test_more_than_2_31_elements(width):
    T = (1 << 31) // CHANNELS + 5000
    q, k, v, d_o = (
        torch.randn(1, T, CHANNELS, device="cuda", dtype=torch.bfloat16).mul_(0.3) for _ in range(4)
    )
    q, k, v, d_o = (x.unflatten(-1, (-1, width)) for x in (q, k, v, d_o))
    beta = torch.ones(CHANNELS // width, device="cuda")
    found = gradients((q, k, v, beta), d_o)[:3]
    # the state forgets distant tokens, so the end can be compared with a call on the last 8000
    tail = slice(T - 8000, T)
    inputs = (*(x[:, tail] for x in (q, k, v)), beta)
    del q, k, v
    exact = gradients(inputs, d_o[:, tail], exact=True)[:3]
    for x, wanted in zip(found, exact, strict=True):
        assert relative_rms(x[:, -2000:], wanted[:, -2000:]) <= LIMIT


@both_widths
def test_both_passes_can_be_captured_in_a_graph(width):
    inputs = inputs_of(2000, width)
    d_o = torch.randn_like(inputs[0])
    leaves = [x.detach().requires_grad_() for x in inputs]

    def call():
        return torch.autograd.grad(chunk_quasar(*leaves)[0], leaves, d_o)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    d_o.copy_(d_o.flip(1))
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(replayed, call(), strict=True))
