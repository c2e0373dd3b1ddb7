"""The layer's backward pass by kernels, on CPU tensors; run by test_interpreter.py.

It needs TRITON_INTERPRET=1, as interpreted_kernels.py does, and shares its poisoned memory.
"""

from __future__ import annotations

import copy

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.layer import gradients as layer_grads
from fla.ops.quasar.layer import kernels as layer_kernels
from fla.ops.quasar.layer import node as layer_node
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.layer.simulated_graph import simulate
from tests.quasar_kernels.layer.steps import exact_step, step
from tests.quasar_kernels.triton_kernels.interpreted_kernels import poisoned  # noqa: F401

D, H, S = 48, 3, 16


def places(kind, R):
    """What tells a convolution of R rows its sequences: one, four of one length, or packed ones."""
    return {"one": None, "equal": R // 4, "packed": (torch.arange(R) % 7).int()}[kind]


@pytest.mark.parametrize(
    ("parts", "dtype", "R", "N"),
    [
        (1, torch.float32, 4, 40),
        (1, torch.float32, 44, 40),
        (3, torch.bfloat16, 20, 40),
        (3, torch.bfloat16, 8, 300),
    ],
)
@pytest.mark.parametrize("kind", ["one", "equal", "packed"])
def test_gradients_of_the_convolution(R, N, kind, parts, dtype):
    C, position = parts * N, places(kind, R)
    x = torch.randn(R, C + 8).to(dtype)[:, :C]
    taps, bias = torch.randn(C, 4), torch.randn(C) if parts == 1 else None
    dys = tuple(torch.randn(R, N).to(dtype) for _ in range(parts))
    into = torch.full((R, C + 24), 7.0)
    found = layer_grads.launch_conv_silu_grad(x, taps, bias, position, dys, into[:, :C])
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, taps, bias)]
    y = layer_kernels.conv_silu_torch(*leaves, position)
    y.backward(torch.cat(dys, 1).double())
    assert relative_rms(into[:, :C], leaves[0].grad) <= 1e-6
    assert (into[:, C:] == 7).all()  # the columns beside it are others'
    assert relative_rms(found[0], leaves[1].grad) <= 1e-6
    if bias is not None:
        assert relative_rms(found[1], leaves[2].grad) <= 1e-6


@pytest.mark.parametrize(("rows", "R"), [(16, 44), (64, 100)])
@pytest.mark.parametrize("kind", ["one", "equal", "packed"])
def test_gradients_of_the_convolution_in_programs_of_any_length(monkeypatch, rows, R, kind):
    monkeypatch.setattr(layer_grads, "_PROGRAMS", 3 * R // rows)
    test_gradients_of_the_convolution(R, 24, kind, 3, torch.float32)


@pytest.mark.parametrize(("R", "heads", "width"), [(1, 2, 16), (40, 3, 24), (70, 1, 64)])
@pytest.mark.parametrize("programs", [1, 4096])
@pytest.mark.parametrize(("output", "overwrite"), [(False, False), (True, False), (True, True)])
def test_gradients_of_the_gated_norm(monkeypatch, R, heads, width, programs, output, overwrite):
    monkeypatch.setattr(layer_grads, "_PROGRAMS", programs)
    torch.manual_seed(0)
    x, gate, dy = (torch.randn(R, heads, width) for _ in range(3))
    weight = torch.rand(width)
    y = torch.full_like(x, float("nan")) if output else None
    leaves = [t.double().requires_grad_() for t in (x, gate, weight)]
    wanted = layer_kernels.gated_rmsnorm_torch(*leaves, 1e-5)
    wanted.backward(dy.double())
    found = layer_grads.launch_gated_rmsnorm_grad(x, gate, weight, dy, 1e-5, y, overwrite=overwrite)
    assert (found[0] is dy, found[1] is gate) == (overwrite, overwrite)
    for gradient, leaf in zip(found, leaves, strict=False):
        assert relative_rms(gradient, leaf.grad) <= 1e-6
    assert relative_rms(found[3], leaves[1].grad.sum(0)) <= 1e-6
    assert y is None or relative_rms(y, wanted) <= 1e-6


def assert_same(found, wanted):
    """Every gradient has the same bits."""
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


@pytest.fixture
def layer(monkeypatch):
    """A layer whose calls take the kernels on a CPU, too; with biases, so that all is there."""
    monkeypatch.setattr("fla.layers.quasar.takes", lambda *_: True)
    torch.manual_seed(0)
    return QuasarAttention(hidden_size=D, head_dim=S, num_heads=H, conv_bias=True)


@pytest.mark.parametrize(
    ("B", "bounds", "dtype", "limit", "ways"),
    [
        (1, [0, 40], torch.float16, 6e-3, ["0", "100"]),
        (2, [0, 20], torch.float16, 6e-3, ["0", "100"]),
        (1, [0, 1, 1, 19, 24], torch.float16, 6e-3, ["0", "100"]),
        (1, [0, 1, 1, 19, 24], torch.float32, 1e-4, ["100"]),
    ],
)
def test_the_layer_s_gradients_match_float64_kept_or_not(
    monkeypatch, layer, B, bounds, dtype, limit, ways
):
    monkeypatch.setattr(layer_node, "MOST_ELEMENTS", 0)
    packed = {"cu_seqlens": torch.tensor(bounds)} if len(bounds) > 2 else {}
    x, dy = torch.randn(2, B, bounds[-1], D)
    found = []
    for kept in ways:
        monkeypatch.setenv("QUASAR_KEEP_MIB", kept)
        found.append(step(layer, x, dy, dtype, **packed))
    wanted = exact_step(layer, x, dy, bounds)
    assert_same(found[0], found[-1])
    for name, gradient in wanted.items():
        assert relative_rms(found[0][name], gradient) <= limit, name


def test_parameters_that_are_frozen_get_no_gradient(layer):
    frozen = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.0.weight", "o_proj.weight")
    x, dy = torch.randn(2, 1, 20, D)
    before = step(layer, x, dy)
    for name, p in layer.named_parameters():
        p.requires_grad_(name not in frozen)
    after = step(layer, x, dy)
    for name, gradient in after.items():
        assert gradient is None if name in frozen else torch.equal(gradient, before[name]), name


@pytest.mark.parametrize("B", [1, 2])
def test_no_tokens_give_zeros(layer, B):
    x = torch.randn(B, 0, D)
    for name, gradient in step(layer, x, x).items():
        assert not gradient.any(), name


def test_an_activation_checkpoint_records_the_same_twice(monkeypatch, layer):
    monkeypatch.setattr(layer_node, "MOST_ELEMENTS", 0)
    x, dy = torch.randn(2, 1, 20, D)
    plain = step(layer, x, dy)

    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=False)[0]
    y.backward(dy)
    assert_same({"y": y, "x": leaf.grad} | {n: p.grad for n, p in layer.named_parameters()}, plain)


@pytest.fixture
def alone():
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")  # torch's own, of hooks on a CPU
def test_replicated_and_sharded_layers_get_the_same_gradients(monkeypatch, layer):
    monkeypatch.setattr(layer_node, "MOST_ELEMENTS", 0)
    x, dy = torch.randn(2, 2, 20, D)
    plain = step(layer, x, dy)
    replicated = DistributedDataParallel(copy.deepcopy(layer))
    found = step(replicated, x, dy)
    assert_same({name.removeprefix("module."): of for name, of in found.items()}, plain)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    for name, gradient in step(layer, x, dy).items():
        whole = gradient.full_tensor() if name in dict(layer.named_parameters()) else gradient
        assert torch.equal(whole, plain[name]), name


def test_replayed_gradients_are_those_of_launches(layer, monkeypatch):
    inputs = [torch.randn(2, 1, 6, D) for _ in range(2)]
    wanted = [step(layer, x, dy, torch.float16) for x, dy in inputs]
    captured = simulate(monkeypatch)
    found = [step(layer, x, dy, torch.float16) for x, dy in inputs * 3]
    assert any(graph.replays for graph in captured)
    for launched, replayed in zip(wanted * 3, found, strict=True):
        assert_same(replayed, launched)


def test_replayed_calls_of_one_layer_overlap_and_accumulate(layer, monkeypatch):
    inputs = [torch.randn(2, 1, 6, D) for _ in range(2)]
    wanted = [step(layer, x, dy, torch.float16) for x, dy in inputs]
    simulate(monkeypatch)
    for _ in range(3):
        layer.zero_grad()
        leaves = [x.clone().requires_grad_() for x, _ in inputs]
        with torch.autocast("cpu", torch.float16):
            outputs = [layer(x)[0] for x in leaves]
        for y, (_, dy) in zip(outputs, inputs, strict=True):
            y.backward(dy.half())
        for leaf, expected in zip(leaves, wanted, strict=True):
            assert torch.equal(leaf.grad, expected["x"])
        for name, p in layer.named_parameters():
            assert torch.equal(p.grad, wanted[0][name] + wanted[1][name]), name


def test_needs_and_parameters_may_change_between_replays(layer, monkeypatch):
    x, dy = torch.randn(2, 1, 20, D)
    captured = simulate(monkeypatch)
    for turn in range(6):
        for name, p in layer.named_parameters():
            p.requires_grad_(turn % 2 == 0 or not name.startswith("q"))
            p.data.mul_(1.1)
        found = step(layer, x, dy, torch.float16)
        wanted = exact_step(layer, x, dy)
        for name, gradient in found.items():
            if gradient is None:
                assert turn % 2 == 1, name
                assert name.startswith("q")
            else:
                assert relative_rms(gradient, wanted[name]) <= 6e-3, name
    assert any(graph.replays for graph in captured)


@pytest.mark.parametrize("most", [0, 1 << 23])
def test_a_recorded_call_goes_backward_twice_by_replays(layer, monkeypatch, most):
    monkeypatch.setattr(layer_node, "MOST_ELEMENTS", most)  # 0: kept
    x, dy = torch.randn(2, 1, 6, D)
    wanted = step(layer, x, dy, torch.float16)["x"]
    captured = simulate(monkeypatch)
    leaf, dy = x.clone().requires_grad_(), dy.half()
    with torch.autocast("cpu", torch.float16):
        y = layer(leaf)[0]
    found = [torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] for _ in range(4)]
    assert any(graph.replays for graph in captured)
    assert all(torch.equal(dx, wanted) for dx in found)


def test_second_derivatives_are_refused(layer):
    x, dy = torch.randn(2, 1, 20, D)
    leaf = x.requires_grad_()
    (dx,) = torch.autograd.grad(layer(leaf)[0], leaf, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (dx.square().sum() + leaf.sum()).backward()
