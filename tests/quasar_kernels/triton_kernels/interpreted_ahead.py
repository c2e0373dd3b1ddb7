"""The kernels that are compiled ahead are those of the call; run by test_interpreter.py.

Needs TRITON_INTERPRET=1. A GPU would specialise the kernels by the recorded keys.
"""

import contextlib

import pytest
import torch
from fla.layers import quasar_adaptive
from fla.ops.quasar import preparation
from fla.ops.quasar.backend import kernel_inputs
from fla.ops.quasar.layer import (
    adaptive,
    adaptive_memory,
    adaptive_training,
    first_step,
    paths,
    wide,
)
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.operator_inputs import Rotation
from fla.ops.quasar.operator_types import Gradients, Saved, Scan, ScanInputs
from fla.ops.quasar.preparation import Preparation
from fla.ops.quasar.segments import Segments
from fla.ops.quasar.triton_kernels import launch, passes
from fla.ops.quasar.triton_kernels.launch import Launcher, compile_ahead

from quasar_kernels.blocks.ssd_triton.launch import ssd_triton
from quasar_kernels.blocks.triton_segments import plan as segments_plan
from quasar_kernels.blocks.wkv6_triton.launch import wkv6_triton
from quasar_kernels.delta_rule.kda_triton import launch as kda_launch
from tests.quasar_kernels.blocks.calls import ssd_inputs, wkv6_inputs
from tests.quasar_kernels.delta_rule.calls import inputs
from tests.quasar_kernels.inputs import packed


@pytest.fixture
def keys(monkeypatch):
    """The keys of launches, which run no kernel, and of kernels that are compiled ahead."""
    found = {"launched": set(), "ahead": set()}

    def record(self, grid, arguments, constants, **options):
        if isinstance(constants, dict):
            names = self._kernel.arg_names[len(arguments) :]
            constants = tuple(constants[name] for name in names)
        key = self._kernel, launch._kinds(arguments), constants, *options.values()
        found["ahead" if arguments[0].is_meta else "launched"].add(key)

    monkeypatch.setattr(Launcher, "__call__", record)
    monkeypatch.setattr(launch, "_known", set())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return found


def assert_ahead(keys):
    assert keys["ahead"] == keys["launched"]
    assert len(keys["ahead"]) >= 2


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bounds", [None, packed([17, 3])], ids=["one", "packed"])
@pytest.mark.parametrize("initial", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("segments", [1, 2])
def test_both_passes_of_the_scan(keys, gated, bounds, initial, segments):
    q, k, v, beta, g = inputs(20, group=2, dtype=torch.float16)
    state = torch.randn(1 if bounds is None else 2, 4, 16, 16) if initial else None
    x = kernel_inputs(ScanInputs.of(q, k, v, beta, state, bounds, 0.5, g if gated else None))
    plan = passes.plan_segments(v, bounds, segments=segments)
    compile_ahead("this call", passes._passes, plan, x, initial, True)
    o, final, saved = passes.forward(x, initial, plan)
    passes.backward(saved, torch.randn_like(o), final)
    assert_ahead(keys)


@pytest.mark.parametrize("bounds", [None, packed([70, 3])], ids=["one", "packed"])
@pytest.mark.parametrize("segments", [1, 2])
def test_both_passes_with_decays_per_channel(keys, bounds, segments):
    x = inputs(73, H=1, dtype=torch.float16, channels=True)
    call = kda_launch.plan_call(x.v, bounds, 0.5, segments)
    y = kda_launch.Inputs(x.q, x.k, x.v, x.g, x.beta, None)
    compile_ahead("this call", kda_launch._passes, call, y, True, True)
    o, final, chunks, kept = kda_launch.forward(call, y, True, True)
    kda_launch.backward(call, y, chunks, kept, torch.randn_like(o), final)
    assert_ahead(keys)


@pytest.mark.parametrize(
    "how", [Preparation(True), Preparation(False, 1.0), Preparation(True, 2.0)]
)
def test_both_passes_of_the_preparation(keys, how):
    _, q, k = torch.randn(2, 19, 3, 2, 24).unbind(2)
    beta = torch.randn(2, 4, 19).mT
    compile_ahead("this call", preparation._passes, how, q, k, beta, True)
    prepared = preparation.launch_preparation(how, q, k, beta)
    gradients = (torch.randn_like(x) for x in prepared[:3])
    preparation.launch_preparation_grad(how, prepared, *gradients)
    assert_ahead(keys)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("call", [wkv6_triton, ssd_triton], ids=["wkv6", "ssd"])
def test_both_passes_of_the_blocks(monkeypatch, keys, call, segments):
    is_wkv6 = call is wkv6_triton
    x = wkv6_inputs(40, 1, H=2, V=16) if is_wkv6 else ssd_inputs(40, 1, H=2, P=16)
    forward = segments_plan.KernelsFunction.apply

    def apply(kernels, plan, state, *inputs):
        compile_ahead(
            "this call", segments_plan._passes, kernels, plan, kernels.inputs(*inputs), state, True
        )
        return forward(kernels, plan, state, *inputs)

    monkeypatch.setattr(segments_plan.KernelsFunction, "apply", apply)
    o, _ = call(*(y.requires_grad_() for y in x), segments=segments)
    o.sum().backward()
    assert_ahead(keys)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 24]])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_step_of_the_adaptive_layer(monkeypatch, keys, rotate, bounds, in_memory):
    T, D, H, S = 24, 32, 2, 16
    monkeypatch.setattr(adaptive_training, "SHORT", 0)
    bounds = None if bounds is None else torch.tensor(bounds)
    call = Call(H, S, 1e-5, torch.bfloat16, bounds, "auto")
    layer = quasar_adaptive.AdaptiveQuasarAttention(D, S, H)
    rotation = Rotation(*torch.randn(2, T, 8)) if rotate else None
    x = torch.randn(1, T, D)

    def project(_, rows, weights, taps, keep, into):  # as on Hopper
        products = (rows @ weights.T)[:, : 3 * H * S].half()
        narrow = torch.zeros(T, S, dtype=rows.dtype)
        results = products.clone(), narrow, products if keep else None
        return results if into is None else tuple(map(torch.Tensor.copy_, into, results))

    def scan(inputs, **_):  # not by Triton's kernels, which have tests above
        return Scan(torch.zeros(inputs.v.shape).half(), None, Saved(inputs, None, None, None))

    def scan_gradients(saved, do, **_):
        return Gradients(do, do, do, torch.zeros(do.shape[:3]), None, None)

    if in_memory:
        segments = Segments(1, 1, 1, T, None, None, T)
        monkeypatch.setattr(adaptive_memory, "_scan_program", lambda *_: object())
        monkeypatch.setattr(adaptive, "cuda_program", lambda *_: object())
        monkeypatch.setattr(adaptive.cuda_scan, "forward", scan)
        monkeypatch.setattr(adaptive.cuda_scan, "cut_segments", lambda *_: segments)
    monkeypatch.setattr(adaptive, "scan_forward", scan)
    monkeypatch.setattr(adaptive_training, "scan_backward", scan_gradients)
    monkeypatch.setattr(paths, "choose_products", lambda *_: paths.Path(wide, object()))
    monkeypatch.setattr(wide, "project_wide", project)
    monkeypatch.setattr(adaptive, "unrounded", lambda rows, weight: (rows @ weight.T).float())
    first_step.prepare(call, rotation, x, layer._plain_weights())
    weights = layer._plain_weights()
    adaptive_training.record_adaptive(call, layer, rotation, x, weights).sum().backward()
    assert_ahead(keys)
