"""Layers with hooks or adapters, and outputs that are changed in place, on a GPU."""

import pytest
import torch
from fla.layers.quasar import QuasarCache

from quasar_kernels.reference import relative_rms
from tests.gpu.calls import packed
from tests.gpu.layer.layers import call, graphs, make_layer
from tests.quasar_kernels.blocks.test_wrapped_modules import Adapted

pytestmark = pytest.mark.gpu


@pytest.fixture
def pair():
    """A layer with an adapter and a hook, and the same layer with changed weights."""
    layer, same = make_layer(), make_layer()
    layer.k_proj = Adapted(layer.k_proj).cuda()
    layer.o_proj.register_forward_hook(lambda module, args, y: 2 * y)
    with torch.no_grad():
        same.k_proj.weight += layer.k_proj.up.weight @ layer.k_proj.down.weight
        same.o_proj.weight *= 2
    return layer, same


@pytest.mark.parametrize("shape", [(2, 300), (1, 20_000)])
def test_hooks_and_adapters_change_the_result_and_get_gradients(pair, shape):
    layer, same = pair
    x = torch.randn(*shape, 512, device="cuda", requires_grad=True)
    found, wanted = call(layer, x), call(same, x)
    assert found.dtype == torch.bfloat16
    assert relative_rms(found, wanted.double()) <= 2e-2
    dy = torch.randn_like(found)
    (dx,), (expected,) = (torch.autograd.grad(y, x, dy, retain_graph=True) for y in (found, wanted))
    assert relative_rms(dx, expected.double()) <= 4e-2
    found.backward(dy)
    assert layer.k_proj.down.weight.grad.any()
    assert not graphs(layer)


def test_hooks_and_adapters_with_a_cache_and_packed_sequences(pair):
    x, caches, parts = torch.randn(1, 300, 512, device="cuda"), [QuasarCache() for _ in pair], []
    with torch.no_grad():
        for part in x.split([30, 1, 1, 1, 3, 64, 200], 1):
            rest = {"use_cache": True}
            parts.append(
                [
                    call(layer, part, past_key_values=cache, **rest)
                    for layer, cache in zip(pair, caches, strict=True)
                ]
            )
        bounds = packed([7, 0, 93, 200])
        parts.append([call(layer, x, cu_seqlens=bounds) for layer in pair])
    for found, wanted in parts:
        assert relative_rms(found, wanted.double()) <= 2e-2


@pytest.mark.parametrize("limit", ["0", "3072"])
@pytest.mark.parametrize("T", [700, 9000, 20_000, 40_000])
def test_outputs_may_be_changed_in_place(layer, monkeypatch, T, limit):
    monkeypatch.setenv("QUASAR_KEEP_MIB", limit)
    x, steps = torch.randn(1, T, 512, device="cuda", requires_grad=True), []
    for _ in range(3):  # launched, captured and replayed, if it is short enough
        for in_place in (False, True):
            y = call(layer, x)
            if in_place:
                y += 1
            else:
                y = y + 1
            loss = y.float().square().sum()
            steps.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
            del y, loss
    for step in steps[1:]:
        assert all(map(torch.equal, step, steps[0]))
