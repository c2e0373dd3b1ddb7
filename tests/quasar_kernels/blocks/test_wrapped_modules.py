"""Hooks on the submodules of blocks run, and replaced submodules compute their part."""

import copy

import pytest
import torch
from torch import nn

from quasar_kernels.blocks import HybridBlock, Mamba2, RWKV6TimeMixing
from quasar_kernels.reference import relative_rms

WIDTH = 32
MAKE = {
    "mamba2": lambda: Mamba2(WIDTH, 4, 16),
    "rwkv6": lambda: RWKV6TimeMixing(WIDTH, 2),
    "hybrid": lambda: HybridBlock(WIDTH, 2, state=16),
    "gated hybrid": lambda: HybridBlock(WIDTH, 2, fusion="gated", state=16),
    "mean hybrid": lambda: HybridBlock(WIDTH, 2, fusion="mean", state=16),
}
CONTAINERS = (nn.ModuleDict, nn.ModuleList)
makers = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())


def call(block, x, **options):
    if isinstance(block, HybridBlock):
        options["keep"] = True
    return block(x, **options)


def in_parts(block, x):
    """Return the outputs of three calls, each from the last one's states."""
    state, outputs = None, []
    for part in x.split([7, 1, 5], 1):
        y, state = call(block, part, state=state)
        outputs.append(y)
    return torch.cat(outputs, 1)


@makers
def test_hooks_on_all_submodules_are_called_and_change_no_result(make):
    torch.manual_seed(0)
    block, x = make(), torch.randn(1, 13, WIDTH)
    bounds = torch.tensor([0, 4, 4, 13])
    runs = [
        lambda: call(block, x)[0],
        lambda: call(block, x, cu_seqlens=bounds)[0],
        lambda: in_parts(block, x),
    ]
    plain, seen = [run() for run in runs], set()
    for name, module in block.named_modules():
        module.register_forward_hook(lambda module, args, y, name=name: seen.add(name))
    for run, wanted in zip(runs, plain, strict=True):
        seen.clear()
        assert relative_rms(run(), wanted.double()) <= 1e-5
        called = {n for n, m in block.named_modules() if not isinstance(m, CONTAINERS)}
        assert called == seen


@makers
def test_a_hook_scales_the_result_as_a_scaled_weight(make):
    torch.manual_seed(0)
    block, x = make(), torch.randn(2, 9, WIDTH)
    names = [n for n, m in block.named_modules() if type(m) in (nn.Linear, nn.Conv1d, nn.GroupNorm)]
    assert names
    for name in names:
        scaled, hooked = copy.deepcopy(block), copy.deepcopy(block)
        for p in scaled.get_submodule(name).parameters():
            p.data *= 2
        hooked.get_submodule(name).register_forward_hook(lambda module, args, y: 2 * y)
        expected = call(scaled, x)[0]
        assert relative_rms(call(hooked, x)[0], expected.double()) <= 1e-5, name


class Adapted(nn.Module):
    """A linear module with a low-rank adapter, without the linear module's attributes."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@makers
def test_adapters_change_the_result_and_get_gradients(make):
    torch.manual_seed(0)
    block, x = make(), torch.randn(2, 9, WIDTH)
    names = [n for n, m in block.named_modules() if isinstance(m, nn.Linear)]
    for name in names:
        adapted, merged = copy.deepcopy(block), copy.deepcopy(block)
        parent, _, last = name.rpartition(".")
        adapter = Adapted(adapted.get_submodule(name))
        setattr(adapted.get_submodule(parent), last, adapter)
        change = adapter.up.weight.detach() @ adapter.down.weight.detach()
        merged.get_submodule(name).weight.data += change
        y = call(adapted, x)[0]
        assert relative_rms(y, call(merged, x)[0].double()) <= 1e-5, name
        y.sum().backward()
        assert adapter.down.weight.grad.any(), name
