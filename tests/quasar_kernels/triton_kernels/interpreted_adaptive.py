"""The adaptive layer's kernels on CPU tensors against float64; run by test_interpreter.py.

Needs TRITON_INTERPRET=1. The fixture `poisoned` of interpreted_kernels.py applies here, too.
"""

import functools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from fla.layers import quasar_adaptive
from fla.layers.quasar import QuasarCache
from fla.ops.quasar import backend
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.layer import adaptive, adaptive_memory, adaptive_training, paths, wide
from fla.ops.quasar.layer.adaptive_memory import SAVING
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.gradients import gradient_scale
from fla.ops.quasar.layer.kernels import launch_conv_silu
from fla.ops.quasar.layer.operator_inputs import OperatorInputsFunction, Rotation
from fla.ops.quasar.operator_types import Scan
from fla.ops.quasar.segments import Segments
from fla.ops.quasar.triton_kernels import passes as triton_passes

from quasar_kernels.adaptive_reference import operator_inputs_reference
from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.layer.simulated_graph import simulate
from tests.quasar_kernels.layer.steps import exact_step, step
from tests.quasar_kernels.triton_kernels.interpreted_kernels import poisoned  # noqa: F401


@pytest.mark.parametrize(
    ("N", "H", "S", "R", "L"), [(1, 1, 16, 0, 1), (20, 2, 24, 16, 5), (40, 2, 64, 64, 40)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results_and_gradients(N, H, S, R, L, dtype):
    qkv = torch.randn(N, 3 * H * S, dtype=dtype).view(N, 3, H, S)
    angles = torch.randn(L, R // 2)
    rotation = Rotation(angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)) if R else None
    tensors = qkv[:, 0], qkv[:, 1], torch.randn(N, H), torch.randn(H), torch.randn(H * S)
    results, exact = with_float64(
        lambda *x: OperatorInputsFunction.apply(*x, rotation),
        lambda *x: operator_inputs_reference(*x, rotation),
        *tensors,
    )
    check(results, exact, {torch.float32: 1e-5, torch.float16: 1.5e-3}[dtype])


def test_keys_of_zeros_and_small_decays():
    q, k = torch.randn(5, 1, 16), torch.randn(5, 1, 16)
    k[2] = 0.0
    rest = torch.zeros(5, 1), torch.tensor([-12.0]), torch.zeros(16)
    _, unit, steps = OperatorInputsFunction.apply(q, k, *rest, None)
    assert unit[2].eq(0).all()
    assert steps.isfinite().all()
    assert steps.max() < 1e-3


@pytest.mark.parametrize(
    ("dtype", "rotate", "B", "bounds", "size"),
    [
        (torch.float16, True, 1, [0, 1, 1, 12, 16], 1.0),
        (torch.bfloat16, True, 2, None, 1e-12),
        (torch.bfloat16, False, 1, [0, 1, 1, 12, 16], 1e12),
    ],
)
def test_the_layer_s_gradients_with_saved_and_recomputed_results(
    monkeypatch, dtype, rotate, B, bounds, size
):
    monkeypatch.setattr(quasar_adaptive, "supports_kernels", lambda *_: True)
    T, D, H, S = 16, 32, 2, 16
    layer = quasar_adaptive.AdaptiveQuasarAttention(D, S, H, conv_bias=True)
    with torch.no_grad():
        layer.dt_bias.normal_()
    x, dy = torch.randn(2, B, T, D)
    dy *= size  # the operator's gradients are fp16, whatever their size
    angles = torch.randn(T, 4).repeat(1, 2)
    rotation = (angles.cos(), angles.sin()) if rotate else None
    tables = dict(zip(("cos", "sin"), (t[None, None] for t in rotation or ()), strict=False))
    if bounds:
        tables["cu_seqlens"] = torch.tensor(bounds)

    def call(x, **options):
        y, _ = layer(x, **options)
        assert y.grad_fn.name() == "AdaptiveFunctionBackward"
        y += 0  # outputs may be changed in place
        return (y,)

    steps = []
    for mib, short in (("0", 0), ("100", 0), ("100", 1 << 22)):
        monkeypatch.setattr(adaptive_training, "SHORT", short)
        monkeypatch.setenv("QUASAR_KEEP_MIB", mib)
        steps.append(step(layer, x, dy, dtype, call, **tables))
    wanted = exact_step(layer, x, dy, bounds, rotation)
    del wanted["f_proj.weight"]
    errors = {name: relative_rms(steps[0][name], exact) for name, exact in wanted.items()}
    if dtype == torch.bfloat16:  # the interpreter's bf16 products are wrong
        del errors["y"]
    limit = {torch.float16: 6e-3, torch.bfloat16: 1.5e-2}[dtype]
    assert all(error <= limit for error in errors.values()), errors
    for name in wanted:
        assert all(torch.equal(steps[0][name], step[name]) for step in steps), name


def test_after_a_failed_launch_the_library_path_runs(monkeypatch):
    def refuse(*_):
        raise CudaUnavailableError("refused")

    layer, x = quasar_adaptive.AdaptiveQuasarAttention(32, 16, 2), torch.randn(1, 20, 32)
    call = Call(2, 16, 1e-5, torch.float16, None, "auto")
    with torch.no_grad():
        run = partial(adaptive.run_adaptive, call, layer, None, x, layer._plain_weights())
        expected = run()
        path = paths.Path(wide, SimpleNamespace(variant="refused"))
        monkeypatch.setattr(paths, "choose_products", lambda *_: path)
        monkeypatch.setattr(wide, "project_wide", refuse)
        monkeypatch.setattr(wide.PROGRAM, "_entries", {})
        assert torch.equal(run(), expected)
    assert [*wide.PROGRAM._entries] == ["refused"]


def results_of(layer, x, dy, tables, backward_passes=1):
    """Return the output of a call in fp16 without gradients, that of a step, and its gradients."""
    x = x.requires_grad_()
    with torch.autocast("cpu", torch.float16):
        with torch.no_grad():
            alone, _ = layer(x, **tables)
        y, _ = layer(x, **tables)
    leaves = [x, *(p for n, p in layer.named_parameters() if n != "f_proj.weight")]
    for _ in range(backward_passes):
        gradients = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    return alone, y, *gradients


def fake_hopper(monkeypatch):
    """Let Hopper's kernels, which need a GPU, be computed by torch and Triton."""

    def project(_, rows, weights, taps, keep, into=None):
        C = taps.shape[0]
        mixed = rows.float() @ weights.float().T
        products = mixed[:, :C].half()
        results = (
            launch_conv_silu(products, taps, None, None, torch.float16),
            mixed[:, C:].half(),
            products,
        )
        return results if into is None else tuple(map(torch.Tensor.copy_, into, results))

    def scan(inputs, *, program, into):
        o, _, saved = triton_passes.forward(inputs)
        assert saved.G is None
        return Scan(into[0].copy_(o), None, saved)

    def cut(program, shape, device, cu_seqlens):
        B, T = shape[:2]
        return Segments(B, B, 1, T, None, None, T)

    monkeypatch.setattr(paths, "choose_products", lambda *_: paths.Path(wide, object()))
    monkeypatch.setattr(wide, "project_wide", project)
    monkeypatch.setattr(adaptive, "unrounded", lambda rows, w: rows.float() @ w.float().T)
    monkeypatch.setattr(adaptive_memory, "_scan_program", lambda *_: object())
    monkeypatch.setattr(adaptive, "cuda_program", lambda *_: object())
    monkeypatch.setattr(adaptive.cuda_scan, "forward", scan)
    monkeypatch.setattr(adaptive.cuda_scan, "cut_segments", cut)
    monkeypatch.setattr(backend, "cuda_gradient_program", lambda _: None)


@pytest.mark.parametrize("kept", ["recomputed", "saved", "in memory"])
def test_replays_have_the_bits_of_launches(monkeypatch, kept):
    monkeypatch.setattr(quasar_adaptive, "supports_kernels", lambda *_: True)
    if kept != "recomputed":
        monkeypatch.setattr(adaptive_training, "SHORT", 0)
    if kept == "in memory":
        fake_hopper(monkeypatch)
        # as in a training on a GPU, each step gets the same memory
        allocate = functools.cache(lambda n: torch.zeros(n, dtype=torch.uint8))
        monkeypatch.setattr(adaptive_memory, "_new", lambda x, n: allocate(n).fill_(255))
    layer, T = quasar_adaptive.AdaptiveQuasarAttention(16, 16, 1), 16
    tables = dict(zip(("cos", "sin"), torch.randn(2, 1, 1, T, 8), strict=True))
    first, second = ((torch.randn(1, T, 16), torch.randn(1, T, 16).half()) for _ in range(2))
    calls = [(1.0, first), (1.0, second), (1.5, first)]  # a graph reads the current weights
    weight = layer.k_proj.weight.detach().clone()

    def results(factor, pair, passes):
        layer.k_proj.weight.data.copy_(factor * weight)
        return results_of(layer, *pair, tables, passes)

    launched = [results(*call, 1) for call in calls]
    captured = simulate(monkeypatch)
    # on a CPU, saved results have the same addresses only in passes of one call
    passes = 3 if kept == "saved" else 1
    for call, expected in zip(calls, launched, strict=True):
        assert all(map(torch.equal, results(*call, passes), expected))
    replays = {graph.operation: graph.replays for graph in captured}
    expected = {adaptive.FORWARD, adaptive_training.BACKWARD}
    assert replays.keys() == expected | ({SAVING} if kept == "in memory" else set())
    assert all(replays.values()), replays


@pytest.mark.parametrize("replay", [False, True])
def test_decoded_tokens_equal_one_call(monkeypatch, replay):
    layer = quasar_adaptive.AdaptiveQuasarAttention(32, 16, 2, conv_bias=True, layer_idx=0)
    monkeypatch.setattr(quasar_adaptive, "supports_kernels", lambda *_: True)
    captured = simulate(monkeypatch) if replay else []
    cache, x, (cos, sin) = QuasarCache(), torch.randn(2, 20, 32), torch.randn(2, 1, 1, 20, 8)
    lengths, outputs, held = [10, 1, 1, 1, 1, 3, 3], [], []
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        whole, _ = layer(x, cos=cos, sin=sin)
        parts = zip(x.split(lengths, 1), cos.split(lengths, 2), sin.split(lengths, 2), strict=True)
        for part, *tables in parts:
            options = dict(zip(("cos", "sin"), tables, strict=True))
            y, _ = layer(part, past_key_values=cache, use_cache=True, **options)
            outputs.append(y)
            held.append((cache[0]["recurrent_state"], cache[0]["recurrent_state"].clone()))
    expected = whole.split(lengths, 1)
    errors = [relative_rms(a, b) for a, b in zip(outputs, expected, strict=True)]
    assert max(errors) <= 3e-3, errors
    assert all(torch.equal(state, as_it_was) for state, as_it_was in held)
    assert cache[0]["seen_tokens"] == 20
    assert not replay or sum(graph.replays for graph in captured) >= 3


@triton.jit
def scale_kernel(largest, scales):
    scale, inverse = gradient_scale(largest)
    tl.store(scales, scale)
    tl.store(scales + 1, inverse)


@pytest.mark.parametrize("largest", [0.0, 1e-36, 1e-9, 1.0, 1.99, 3e37, float("inf")])
def test_gradients_of_any_size_get_a_finite_power_of_two(largest):
    scales = torch.zeros(2)
    scale_kernel[(1,)](torch.tensor([largest]), scales)
    scale, inverse = scales.tolist()
    assert scale * inverse == 1.0
    assert math.frexp(scale)[0] == 0.5
    if 0 < largest < math.inf:
        assert 1 <= scale * largest < 2


def test_zero_gradients_stay_zero(monkeypatch):
    monkeypatch.setattr(quasar_adaptive, "supports_kernels", lambda *_: True)
    layer, x = quasar_adaptive.AdaptiveQuasarAttention(32, 16, 2), torch.randn(1, 20, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x.requires_grad_())
    y.backward(torch.zeros_like(y))
    assert not x.grad.any()
    assert not any(p.grad.any() for p in layer.parameters() if p.grad is not None)
