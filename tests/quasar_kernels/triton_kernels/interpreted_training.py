"""The Triton kernels of the layer's backward pass on CPU tensors; run by test_interpreter.py.

It needs TRITON_INTERPRET=1, as interpreted_kernels.py does.
"""

import copy
from functools import partial

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.layer import gradients as layer_grads
from fla.ops.quasar.layer import graphs, paths
from fla.ops.quasar.layer import kernels as layer_kernels
from fla.ops.quasar.layer.rank_slice import RankSlice
from fla.ops.quasar.layer.wrapped import plain_weights
from fla.ops.quasar.parallel.context import SequenceContext
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.float64 import check
from tests.quasar_kernels.layer.simulated_graph import simulate
from tests.quasar_kernels.layer.steps import exact_step, step
from tests.quasar_kernels.tolerances import BETA_GRADIENT
from tests.quasar_kernels.triton_kernels.interpreted_kernels import poisoned  # noqa: F401

D, H, S = 32, 2, 16


def places(kind, R):
    """Return the `position` argument of R rows: one sequence, four of equal length, or packed."""
    return {"one": None, "equal": R // 4, "packed": (torch.arange(R) % 7).int()}[kind]


@pytest.mark.parametrize(
    ("kind", "parts", "dtype", "R", "N"),
    [
        ("one", 1, torch.float32, 4, 40),
        ("equal", 1, torch.float32, 44, 40),
        ("packed", 1, torch.float32, 44, 40),
        ("one", 3, torch.bfloat16, 20, 40),
        ("packed", 3, torch.bfloat16, 20, 40),
        ("packed", 3, torch.bfloat16, 8, 300),
    ],
)
def test_gradients_of_the_convolution(R, N, kind, parts, dtype):
    C, position = parts * N, places(kind, R)
    x = torch.randn(R, C + 8).to(dtype)[:, :C]
    taps, bias = torch.randn(C, 4), torch.randn(C) if parts == 1 else None
    dys = tuple(torch.randn(R, N).to(dtype) for _ in range(parts))
    dx = torch.full((R, C + 24), 7.0)
    gradients = layer_grads.launch_conv_silu_grad(x, taps, bias, position, dys, dx[:, :C])
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, taps, bias)]
    y = layer_kernels.conv_silu_torch(*leaves, position)
    y.backward(torch.cat(dys, 1).double())
    assert relative_rms(dx[:, :C], leaves[0].grad) <= 1e-6
    assert (dx[:, C:] == 7).all()  # other columns do not change
    assert relative_rms(gradients[0], leaves[1].grad) <= 1e-6
    if bias is not None:
        assert relative_rms(gradients[1], leaves[2].grad) <= 1e-6


@pytest.mark.parametrize("tokens", [0, 1, 9])  # of a slice, after 5 of an earlier rank
def test_gradients_of_a_slice_s_first_tokens_pass_through_the_halo(monkeypatch, tokens):
    monkeypatch.setattr(distributed, "get_rank", lambda *_: 1)
    monkeypatch.setattr(distributed, "get_world_size", lambda *_: 2)
    bounds = torch.tensor([0, tokens])
    context = SequenceContext("group", bounds, bounds, (5, tokens), 1, 0, 5)
    rank = RankSlice(context, tokens, taps=4)
    layer = QuasarAttention(D, S, H)
    x, dys = torch.randn(1, 5 + tokens, D), torch.randn(3, 1, tokens, H, S)
    weights = plain_weights(layer)
    projections, (taps, _) = torch.cat(weights[:3]).detach(), weights.joined_taps()
    rank.halo = x[0, 2:5]
    leaves = [each.detach().double().requires_grad_() for each in (x[0], projections, taps)]
    y = layer_kernels.conv_silu_torch(leaves[0] @ leaves[1].T, leaves[2], None, None)
    y[5:].backward(torch.cat([*dys.double().flatten(3)], -1)[0])

    products = x[0, 5:] @ projections.T
    d_products = torch.empty_like(products)
    with torch.no_grad():
        rank.take_first_gradients(x[:, 5:], projections, weights, dys)
        d_taps, d_shift = layer_grads.launch_conv_silu_grad(
            products, taps, None, None, tuple(d.view(tokens, H * S) for d in dys), d_products
        )
        rank.add_first_gradients(d_products, d_taps, d_shift)
        d_projections = d_products.T @ x[0, 5:]
        rank.add_halo_projections(d_projections)
    dx = torch.cat([rank._d_halo, d_products @ projections])
    for found, leaf in zip((dx, d_projections, d_taps), leaves, strict=True):
        wanted = leaf.grad[2:] if found is dx else leaf.grad
        assert torch.allclose(found.double(), wanted, atol=1e-5), (found, wanted)


@pytest.mark.parametrize(("rows", "R", "kind"), [(16, 44, "equal"), (64, 100, "packed")])
def test_gradients_of_the_convolution_by_programs_of_any_length(monkeypatch, rows, R, kind):
    monkeypatch.setattr(layer_grads, "_PROGRAMS", 3 * R // rows)
    test_gradients_of_the_convolution(R, 24, kind, 3, torch.float32)


@pytest.mark.parametrize(
    ("R", "heads", "width", "programs"),
    [(1, 2, 16, 4096), (40, 3, 24, 1), (70, 1, 64, 1), (70, 1, 64, 4096)],
)
@pytest.mark.parametrize(("output", "overwrite"), [(False, False), (True, True)])
def test_gradients_of_the_gated_norm(monkeypatch, R, heads, width, programs, output, overwrite):
    monkeypatch.setattr(layer_grads, "_PROGRAMS", programs)
    x, gate, dy = (torch.randn(R, heads, width) for _ in range(3))
    weight = torch.rand(width)
    y = torch.full_like(x, float("nan")) if output else None
    leaves = [t.double().requires_grad_() for t in (x, gate, weight)]
    expected = layer_kernels.gated_rmsnorm_torch(*leaves, 1e-5)
    expected.backward(dy.double())
    dx, dgate, dweight, dbias = layer_grads.launch_gated_rmsnorm_grad(
        x, gate, weight, dy, 1e-5, y, overwrite=overwrite
    )
    assert (dx is dy, dgate is gate) == (overwrite, overwrite)
    check((dx, dgate, dweight), (leaf.grad for leaf in leaves), 1e-6)
    assert relative_rms(dbias, leaves[1].grad.sum(0)) <= 1e-6
    assert y is None or relative_rms(y, expected) <= 1e-6


def assert_same(step, expected):
    """Check that all results have the same bits."""
    assert step.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(step[name], gradient), name


@pytest.fixture
def layer(monkeypatch):
    """Return a layer with all parameters, whose calls use the kernels also on a CPU."""
    monkeypatch.setattr(paths, "supports_kernels", lambda *_: True)
    return QuasarAttention(hidden_size=D, head_dim=S, num_heads=H, conv_bias=True)


@pytest.mark.parametrize(
    ("B", "bounds", "dtype", "limit", "limits_mib"),
    [
        (2, [0, 14], torch.float16, 6e-3, ["0", "100"]),
        (1, [0, 1, 1, 18, 20], torch.float16, 6e-3, ["0", "100"]),
        (1, [0, 1, 1, 18, 20], torch.float32, 1e-4, ["100"]),
    ],
)
def test_the_layer_s_gradients_with_saved_and_recomputed_results(
    monkeypatch, layer, B, bounds, dtype, limit, limits_mib
):
    monkeypatch.setattr(graphs, "MAX_ELEMENTS", 0)
    packed = {"cu_seqlens": torch.tensor(bounds)} if len(bounds) > 2 else {}
    x, dy = torch.randn(2, B, bounds[-1], D)
    steps = []
    for mib in limits_mib:
        monkeypatch.setenv("QUASAR_KEEP_MIB", mib)
        steps.append(step(layer, x, dy, dtype, **packed))
    assert_same(steps[0], steps[-1])
    for name, gradient in exact_step(layer, x, dy, bounds).items():
        # the terms of beta's gradient cancel, so it has a larger error in fp16
        most = BETA_GRADIENT if name == "beta_log" and dtype == torch.float16 else limit
        assert relative_rms(steps[0][name], gradient) <= most, name


@pytest.mark.parametrize("limit", ["0", "100"])  # recomputed and saved results
def test_outputs_may_be_changed_in_place(monkeypatch, layer, limit):
    monkeypatch.setattr(graphs, "MAX_ELEMENTS", 0)
    monkeypatch.setenv("QUASAR_KEEP_MIB", limit)
    x, dy = torch.randn(2, 1, 6, D)

    def added_in_place(x):
        y, *_ = layer(x)
        y += x
        return (y,)

    found = step(layer, x, dy, call=added_in_place)
    assert_same(found, step(layer, x, dy, call=lambda x: (layer(x)[0] + x,)))


def test_frozen_parameters_have_no_gradient(layer):
    frozen = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.0.weight", "o_proj.weight")
    x, dy = torch.randn(2, 1, 6, D)
    before = step(layer, x, dy)
    for name, p in layer.named_parameters():
        p.requires_grad_(name not in frozen)
    after = step(layer, x, dy)
    for name, gradient in after.items():
        assert gradient is None if name in frozen else torch.equal(gradient, before[name]), name


@pytest.mark.parametrize("B", [1, 2])
def test_without_tokens_all_gradients_are_zero(layer, B):
    x = torch.randn(B, 0, D)
    for name, gradient in step(layer, x, x).items():
        assert not gradient.any(), name


def test_an_activation_checkpoint_gives_the_same_gradients(monkeypatch, layer):
    monkeypatch.setattr(graphs, "MAX_ELEMENTS", 0)
    x, dy = torch.randn(2, 1, 6, D)
    plain = step(layer, x, dy)
    run = partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False)
    assert_same(step(layer, x, dy, call=run), plain)


@pytest.fixture
def process_group():
    """Make a process group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")  # torch warns of hooks on a CPU
def test_replicated_and_sharded_layers_have_the_same_gradients(monkeypatch, layer):
    monkeypatch.setattr(graphs, "MAX_ELEMENTS", 0)
    x, dy = torch.randn(2, 2, 6, D)
    plain = step(layer, x, dy)
    replicated = step(DistributedDataParallel(copy.deepcopy(layer)), x, dy)
    assert_same({name.removeprefix("module."): g for name, g in replicated.items()}, plain)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    for name, gradient in step(layer, x, dy).items():
        whole = gradient.full_tensor() if name in dict(layer.named_parameters()) else gradient
        assert torch.equal(whole, plain[name]), name


def test_replayed_calls_of_one_layer_overlap_and_accumulate(layer, monkeypatch):
    inputs = [torch.randn(2, 1, 6, D) for _ in range(2)]
    launched = [step(layer, x, dy, torch.float16) for x, dy in inputs]
    captured = simulate(monkeypatch)
    for _ in range(2):
        layer.zero_grad()
        leaves = [x.clone().requires_grad_() for x, _ in inputs]
        with torch.autocast("cpu", torch.float16):
            outputs = [layer(x)[0] for x in leaves]
        for y, (_, dy) in zip(outputs, inputs, strict=True):
            y.backward(dy.half())
        for leaf, expected in zip(leaves, launched, strict=True):
            assert torch.equal(leaf.grad, expected["x"])
        for name, p in layer.named_parameters():
            assert torch.equal(p.grad, launched[0][name] + launched[1][name]), name
    assert any(graph.replays for graph in captured)


def test_parameters_and_frozen_ones_may_change_between_replays(layer, monkeypatch):
    x, dy = torch.randn(2, 1, 6, D)
    captured = simulate(monkeypatch)
    for turn in range(6):
        for name, p in layer.named_parameters():
            p.requires_grad_(turn % 2 == 0 or not name.startswith("q"))
            p.data.mul_(1.1)
        results, expected = step(layer, x, dy, torch.float16), exact_step(layer, x, dy)
        for name, gradient in results.items():
            if turn % 2 and name.startswith("q"):
                assert gradient is None, name
            else:
                limit = BETA_GRADIENT if name == "beta_log" else 6e-3
                assert relative_rms(gradient, expected[name]) <= limit, name
    assert any(graph.replays for graph in captured)


@pytest.mark.parametrize("most", [0, 1 << 23])
def test_several_backward_passes_of_one_call_are_replayed(layer, monkeypatch, most):
    monkeypatch.setattr(graphs, "MAX_ELEMENTS", most)  # 0: results are saved
    x, dy = torch.randn(2, 1, 6, D)
    expected = step(layer, x, dy, torch.float16)["x"]
    captured = simulate(monkeypatch)
    leaf, dy = x.clone().requires_grad_(), dy.half()
    with torch.autocast("cpu", torch.float16):
        y = layer(leaf)[0]
    gradients = [torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] for _ in range(3)]
    assert any(graph.replays for graph in captured)
    assert all(torch.equal(dx, expected) for dx in gradients)
