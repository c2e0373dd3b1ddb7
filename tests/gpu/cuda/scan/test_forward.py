"""The CUDA C++ forward pass on a GPU: its maps, the code without wgmma, and use with Triton."""

import pytest
import torch
from fla.ops.quasar import chunk_quasar
from fla.ops.quasar.backend import choose_backend
from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.operator_types import ScanInputs

from quasar_kernels.reference import quasar_chunked, quasar_recurrence, relative_rms
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
from tests.quasar_kernels.inputs import assert_close, common_key
from tests.quasar_kernels.tolerances import BETA_GRADIENT, GRADIENT, OPERATOR

pytestmark = ON_CUDA_KERNELS


@both_widths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("B", "heads"), [(1, 8), (2, 3), (5, 1)])
def test_every_dtype_batch_and_head_count(dtype, B, heads, width):
    inputs = layer_like(333, B=B, H=heads, S=width, dtype=dtype)
    initial = torch.randn(B, heads, width, width, device="cuda")
    expected, state = quasar_recurrence(*inputs, initial)
    result = cuda_scan.forward(ScanInputs.of(*inputs, initial, scale=0.5), True)
    assert_close(result.o, 0.5 * expected, OPERATOR[dtype])
    assert relative_rms(result.final_state, state) <= OPERATOR[dtype]


@both_widths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_without_wgmma(dtype, width):
    inputs = inputs_of(5001, width, dtype=dtype)
    expected, state = quasar_chunked(*inputs)
    program = cuda_scan.PROGRAM.load(cuda_scan.variant_of(inputs[0], PORTABLE))
    result = cuda_scan.forward(ScanInputs.of(*inputs), True, program=program)
    assert_close(result.o, expected, OPERATOR[dtype])
    assert relative_rms(result.final_state, state) <= OPERATOR[dtype]


@both_widths
@pytest.mark.parametrize("T", [2000, 20_000, 300_000])
@pytest.mark.parametrize("noise", [None, 0.1, 0.01])
def test_at_least_as_accurate_as_triton(noise, T, width, monkeypatch):
    q, k, v, beta = inputs_of(T, width)
    if noise is not None:
        k = common_key(k, noise)
    expected, _ = quasar_chunked(q, k, v, beta)
    errors = {}
    for name in ("cuda", "triton"):
        monkeypatch.setenv("QUASAR_BACKEND", name)
        assert choose_backend(q, k, v).backend == name
        errors[name] = relative_rms(chunk_quasar(q, k, v, beta)[0], expected)
    assert errors["cuda"] <= errors["triton"], errors


@both_widths
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_values_across_the_range_of_bf16(size, width):
    q, k, v, beta = inputs_of(1500, width)
    v = (v.float() * size).bfloat16()
    o = cuda_scan.forward(ScanInputs.of(q, k, v, beta)).o
    assert relative_rms(o, quasar_chunked(q, k, v, beta)[0]) <= OPERATOR[torch.bfloat16]


@both_widths
def test_the_number_of_segments_changes_only_the_rounding(width):
    inputs = inputs_of(6000, width)
    expected, _ = quasar_chunked(*inputs)
    for n in (1, 2, 7, 50, 94):
        result = cuda_scan.forward(ScanInputs.of(*inputs), segments=n)
        assert (result.saved.G is None) == (n == 1)
        assert_close(result.o, expected, OPERATOR[torch.bfloat16])


def forgetful_inputs(T, width, dtype=torch.bfloat16):
    """Return inputs with isotropic keys, which make the state forget within a thousand tokens."""
    q, k, v, beta = inputs_of(T, width, dtype=dtype)
    return q, torch.randn_like(k) * 0.15, v, beta


@both_widths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [(), PORTABLE])
def test_negligible_maps_are_not_computed(options, dtype, width):
    T = 8 * cuda_scan.LONG
    inputs = forgetful_inputs(T, width, dtype)
    initial = torch.randn(1, CHANNELS // width, width, width, device="cuda")
    expected, state = quasar_chunked(*inputs, initial)
    program = cuda_scan.PROGRAM.load(cuda_scan.variant_of(inputs[0], options))
    result = cuda_scan.forward(ScanInputs.of(*inputs, initial), True, segments=4, program=program)
    assert not result.saved.G[:-1].any()
    assert_close(result.o, expected, OPERATOR[dtype])
    assert relative_rms(result.final_state, state) <= OPERATOR[dtype]


@both_widths
def test_skipped_maps_are_computed_later_if_the_state_is_large(width, monkeypatch):
    length = cuda_scan.LONG
    q, k, v, beta = forgetful_inputs(4 * length, width)
    beta[:] = 1
    # in one head the state is so large that even its decayed rest matters
    v[:, length : 2 * length - 1024 * (width // 64), 1] *= 2.0**14
    repaired = cuda_scan.forward(ScanInputs.of(q, k, v, beta), segments=4)
    monkeypatch.setattr(cuda_scan, "LONG", 1 << 40)
    full = cuda_scan.forward(ScanInputs.of(q, k, v, beta), segments=4)
    assert torch.equal(repaired.o[:, :, 1], full.o[:, :, 1])
    assert torch.equal(repaired.saved.G[:-1, 1], full.saved.G[:-1, 1])
    others = [n for n in range(CHANNELS // width) if n != 1]
    assert not repaired.saved.G[:-1, others].any()
    assert full.saved.G[:-1, others].any()
    expected, _ = quasar_chunked(q, k, v, beta)
    behind, later = slice(2 * length, 2 * length + 200), slice(2 * length + 200, None)
    # directly behind the large values, the outputs are small remainders of them
    limit = {64: 6.5e-3, 128: 1e-2}[width]
    assert relative_rms(repaired.o[:, behind], expected[:, behind]) <= limit
    assert relative_rms(repaired.o[:, later], expected[:, later]) <= OPERATOR[torch.bfloat16]


@both_widths
def test_gradients_with_skipped_maps(width, monkeypatch):
    monkeypatch.setattr(cuda_scan, "LONG", 1024)
    inputs = forgetful_inputs(200_000, width)
    initial = torch.zeros(1, CHANNELS // width, width, width, device="cuda")
    assert not cuda_scan.forward(ScanInputs.of(*inputs)).saved.G[:-1].all()
    do, d_state = torch.randn_like(inputs[0]), torch.randn_like(initial)
    found = {}
    for name in ("cuda", "triton"):
        monkeypatch.setenv("QUASAR_BACKEND", name)
        found[name] = gradients(inputs, do, initial, d_state)[:3]
    for cuda, triton in zip(found["cuda"], found["triton"], strict=True):
        assert relative_rms(cuda, triton) <= GRADIENT[torch.bfloat16]


@both_widths
def test_states_and_maps_of_segments(width):
    q, k, v, beta = inputs_of(1000, width)
    result = cuda_scan.forward(ScanInputs.of(q, k, v, beta), segments=4)
    length, total = result.saved.segments.length, result.saved.segments.total
    assert total == 4
    for n in range(total - 1):
        stop = (n + 1) * length
        state = quasar_chunked(q[:, :stop], k[:, :stop], v[:, :stop], beta)[1]
        assert relative_rms(result.saved.states[n : n + 1], state) <= OPERATOR[torch.bfloat16]
        # G maps a state through its segment: the effect of an initial state
        start = torch.randn_like(state, dtype=torch.float32)
        part = [x[:, stop - length : stop] for x in (q, k, v)]
        moved = quasar_chunked(*part, beta, start)[1] - quasar_chunked(*part, beta)[1]
        assert relative_rms(result.saved.G[n : n + 1] @ start, moved) <= OPERATOR[torch.bfloat16]


@both_widths
def test_sequences_without_tokens_keep_their_states(width):
    initial = torch.randn(2, CHANNELS // width, width, width, device="cuda")
    result = cuda_scan.forward(ScanInputs.of(*inputs_of(1, width), initial, packed([0, 0])), True)
    assert torch.equal(result.final_state, initial)


@both_widths
def test_packed_sequences_are_independent(width):
    bounds = [0, 700, 765, 9765, 9770]
    *qkv, beta = inputs_of(bounds[-1], width)
    cu = torch.tensor(bounds, device="cuda")
    clean = cuda_scan.forward(ScanInputs.of(*qkv, beta, cu_seqlens=cu), True)
    for x in qkv:
        x[:, bounds[1] : bounds[2]] = float("nan")
    poisoned = cuda_scan.forward(ScanInputs.of(*qkv, beta, cu_seqlens=cu), True)
    for n in (0, 2, 3):
        rows = slice(bounds[n], bounds[n + 1])
        assert torch.equal(poisoned.o[:, rows], clean.o[:, rows])
        assert torch.equal(poisoned.final_state[n], clean.final_state[n])


@both_widths
@pytest.mark.parametrize("packed", [False, True])
def test_triton_backward_after_cuda_forward(packed, width, monkeypatch):
    inputs = inputs_of(3000, width)
    cu = torch.tensor([0, 1000, 1000, 3000], device="cuda") if packed else None
    initial = torch.randn(3 if packed else 1, CHANNELS // width, width, width, device="cuda")
    do, d_state = torch.randn_like(inputs[0]), torch.randn_like(initial)
    found = {}
    monkeypatch.setattr(cuda_scan_bwd, "is_for", lambda *_: False)
    for name in ("cuda", "triton"):
        monkeypatch.setenv("QUASAR_BACKEND", name)
        assert choose_backend(*inputs[:3]).backend == name
        found[name] = gradients(inputs, do, initial, d_state, cu)
    wanted = gradients(inputs, do, initial, d_state, cu, exact=True)
    for mixed, triton, exact in zip(found["cuda"], found["triton"], wanted, strict=True):
        limit = GRADIENT[torch.bfloat16] if exact.ndim > 1 else BETA_GRADIENT
        assert relative_rms(mixed, exact) <= limit
        assert relative_rms(mixed, triton) <= limit
