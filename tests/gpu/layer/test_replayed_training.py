"""Replays of backward passes as CUDA graphs: their results, also after changes."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from tests.gpu.layer.layers import backward_graphs, call, make_layer, moved, swapped

pytestmark = pytest.mark.gpu

SHAPES = [(1, 200), (3, 77), (1, 16_384), (1, 40_000), (5, 5000)]
"""Batches and tokens: up to 16,384 tokens, results are recomputed; above, they are stored."""


def draw(B, T):
    x = torch.randn(B, T, 512, device="cuda").requires_grad_()
    return x, torch.randn(B, T, 512, device="cuda").bfloat16()


def step(layer, x, dy, dtype=torch.bfloat16):
    """Return all gradients of one step by name; x and dy keep their addresses."""
    layer.zero_grad()
    x.grad = None
    call(layer, x, dtype).backward(dy.to(dtype))
    named = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return named if x.grad is None else named | {"x": x.grad}


def launched(monkeypatch, function, *args, **kwargs):
    with monkeypatch.context() as m:
        m.setenv("QUASAR_GRAPHS", "0")
        return function(*args, **kwargs)


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize(("B", "T"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replays_equal_launches_bitwise(monkeypatch, B, T, dtype):
    layer = make_layer()
    x, dy = draw(B, T)
    wanted = launched(monkeypatch, step, layer, x, dy, dtype)
    for _ in range(6):  # with stored results, addresses repeat only after some steps
        assert_equal(step(layer, x, dy, dtype), wanted)
    assert backward_graphs(layer)


def test_replays_do_not_overwrite_earlier_gradients(monkeypatch):
    layer, inputs = make_layer(), [draw(1, 200) for _ in range(6)]
    wanted = [launched(monkeypatch, step, layer, x, dy) for x, dy in inputs]
    found = [step(layer, x, dy) for x, dy in inputs]
    assert backward_graphs(layer)
    for gradients, expected in zip(found, wanted, strict=True):
        assert_equal(gradients, expected)


@pytest.mark.parametrize(("B", "T"), [(1, 200), (1, 20_000)])
def test_new_inputs_gradients_and_parameter_values(monkeypatch, B, T):
    layer = make_layer()
    for n in range(6):
        x, dy = draw(B, T)  # some at other addresses
        if n == 3:
            dy = dy[:, :1].expand(B, T, 512)
        for p in layer.parameters():
            p.data.mul_(0.9)
        assert_equal(step(layer, x, dy), launched(monkeypatch, step, layer, x, dy))


@pytest.mark.parametrize(("B", "T"), [(1, 200), (1, 20_000)])
def test_changing_requires_grad(monkeypatch, B, T):
    layer = make_layer()
    x, dy = draw(B, T)
    for n in range(9):
        x.requires_grad_(n % 3 != 1)
        layer.q_proj.weight.requires_grad_(n % 3 != 2)
        assert_equal(step(layer, x, dy), launched(monkeypatch, step, layer, x, dy))
    y = call(layer, x)
    for leaf in (x, layer.o_proj.weight, layer.beta_log) * 3:
        (alone,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        (again,) = launched(monkeypatch, torch.autograd.grad, y, leaf, dy, retain_graph=True)
        assert torch.equal(alone, again)


@pytest.mark.parametrize("T", [200, 20_000])
def test_a_frozen_layer_computes_only_its_input_s_gradient(monkeypatch, T):
    layer = make_layer().requires_grad_(False)
    x, dy = draw(1, T)
    for _ in range(4):
        found = step(layer, x, dy)
        assert found.keys() == {"x"}
        assert_equal(found, launched(monkeypatch, step, layer, x, dy))


def resized(layer):
    # frees and reallocates a parameter's memory, as sharding does
    weight = layer.k_proj.weight
    values, storage = weight.detach().clone(), weight.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    other = torch.full_like(values, float("nan"))
    storage.resize_(size)
    weight.data.copy_(values * 2)
    del other


@pytest.mark.parametrize("change", [swapped, moved, resized, lambda layer: layer.half()])
@pytest.mark.parametrize("T", [200, 20_000])
def test_replays_use_changed_parameters(monkeypatch, change, T):
    layer = make_layer()
    x, dy = draw(1, T)
    for _ in range(3):
        step(layer, x, dy)
    change(layer)
    for _ in range(4):
        assert_equal(step(layer, x, dy), launched(monkeypatch, step, layer, x, dy))


@pytest.mark.parametrize("T", [200, 20_000])
def test_overwriting_a_parameter_before_the_backward_pass_is_an_error(T):
    layer = make_layer()
    x, dy = draw(1, T)
    for _ in range(3):
        step(layer, x, dy)
    y = call(layer, x)
    with torch.no_grad():
        layer.q_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.parametrize("T", [200, 20_000])
def test_overlapping_calls_of_two_layers_accumulate(monkeypatch, T):
    layers, inputs = [make_layer(), make_layer()], [draw(1, T) for _ in range(2)]

    def all_steps():
        for layer in layers:
            layer.zero_grad()
        outputs = [(call(layer, x), dy, layer, x) for layer in layers for x, dy in inputs]
        for y, dy, _, x in outputs:
            x.grad = None
            y.backward(dy)
        return {
            (i, n): p.grad for i, layer in enumerate(layers) for n, p in layer.named_parameters()
        } | {("x", i): x.grad for i, (x, _) in enumerate(inputs)}

    wanted = launched(monkeypatch, all_steps)
    for _ in range(4):
        assert_equal(all_steps(), wanted)


@pytest.mark.parametrize("T", [200, 20_000])
def test_backward_on_another_thread_or_stream_than_forward(monkeypatch, T):
    layer = make_layer()
    x, dy = draw(1, T)
    wanted = launched(monkeypatch, step, layer, x, dy)
    side = torch.cuda.Stream()

    def on(stream, calls):
        for _ in range(calls):
            layer.zero_grad()
            x.grad = None
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y = call(layer, x)
            torch.cuda.current_stream().wait_stream(side)
            thread = threading.Thread(target=y.backward, args=(dy,))
            thread.start()
            thread.join()
            torch.cuda.synchronize()
            named = {n: p.grad for n, p in layer.named_parameters()}
            assert_equal(named | {"x": x.grad}, wanted)

    for stream in (torch.cuda.current_stream(), side, torch.cuda.current_stream()):
        on(stream, 4)


@pytest.mark.parametrize("T", [200, 20_000])
def test_the_caller_can_capture_a_step(monkeypatch, T):
    layer = make_layer()
    x, dy = draw(1, T)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, x, dy)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        found = {n: g.clone() for n, g in captured.items()}
        assert_equal(found, launched(monkeypatch, step, layer, x, dy))


def pools() -> int:
    """Return the bytes of the memory pools of existing CUDA graphs."""
    gc.collect()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if s["segment_pool_id"] != (0, 0))


def test_graphs_share_their_memory():
    layers, before, sizes = [make_layer() for _ in range(4)], pools(), []
    x, dy = draw(1, 40_000)
    for layer in layers:
        for _ in range(12):
            step(layer, x, dy)
        assert backward_graphs(layer)
        sizes.append(pools() - before)
    assert sizes[0] < 1 << 30
    assert sizes[3] == sizes[1]
