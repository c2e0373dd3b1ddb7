"""Parameters of the blocks: 16-bit dtypes, a start on the meta device, and marks for optimizers."""

import copy
import pickle
from functools import partial

import pytest
import torch

from quasar_kernels.blocks import HybridBlock, Mamba2, QuasarMixer, RWKV6TimeMixing
from quasar_kernels.blocks.fusion import FUSIONS
from quasar_kernels.reference import relative_rms

WIDTH = 32
MODULES = {
    "rwkv6": lambda: RWKV6TimeMixing(WIDTH, 2, 1, 3, output_scale=2.1),
    "mamba2": lambda: Mamba2(WIDTH, 4, 16, groups=2, output_scale=0.5),
    "quasar": lambda: QuasarMixer(WIDTH, 2),
    **{fusion: partial(HybridBlock, WIDTH, 2, fusion=fusion) for fusion in FUSIONS},
}
modules = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
UNDECAYED = {"step_bias", "rate_log", "skip", "gains", "mix_input", "mix", "mix_down", "mix_up"}
UNDECAYED |= {"decay", "decay_down", "decay_up", "bonus", "beta_log"}


@modules
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits(make, dtype):
    module, x = make(), torch.randn(2, 37, WIDTH)
    exact, _ = module(x)
    for half in (copy.deepcopy(module).to(dtype), _made_in(dtype, make)):
        given = x.to(dtype).requires_grad_()
        y, _ = half(given)
        y.sum().backward()
        assert y.dtype == given.grad.dtype == dtype
        assert given.grad.isfinite().all()
        assert all(p.dtype == dtype and p.grad.isfinite().all() for p in half.parameters())
        half.load_state_dict(module.state_dict())
        assert relative_rms(half(given)[0], exact) < 6e-2


def _made_in(dtype, make):
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def assert_drawn_alike(found, make):
    """Compare parameters with those of new modules: constants exactly, random values by range."""
    fresh = [make().state_dict() for _ in range(20)]
    for name, value in found.items():
        known = torch.stack([state[name] for state in fresh])
        low, high = known.min(0).values, known.max(0).values
        if not torch.equal(low, high):
            slack = 0.2 * (known.max() - known.min())
            low, high = known.min() - slack, known.max() + slack
            assert value.unique().numel() > value.numel() / 2, name
            if value.numel() > 100:
                assert value.std().item() == pytest.approx(known.std().item(), rel=0.25), name
        assert ((low <= value) & (value <= high)).all(), (name, value, low, high)


@modules
@pytest.mark.parametrize("children_first", [False, True])
def test_a_start_on_the_meta_device(make, children_first):
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.data.fill_(torch.nan)
    order = [m for m in module.modules() if hasattr(m, "reset_parameters")]
    for m in reversed(order) if children_first else order:
        m.reset_parameters()
    assert_drawn_alike(module.state_dict(), make)


@modules
def test_marks_against_weight_decay(make):
    def marked(module):
        pairs = module.named_parameters()
        return {name for name, p in pairs if getattr(p, "_no_weight_decay", False)}

    module = make()
    names = {n for n, _ in module.named_parameters() if n.split(".")[-1] in UNDECAYED}
    with torch.device("meta"):
        empty = make()
    assigned = make()
    assigned.load_state_dict(module.state_dict(), assign=True)
    for kind, other in {
        "new": module,
        "copy": copy.deepcopy(module),
        "pickle": pickle.loads(pickle.dumps(module)),  # noqa: S301 # its own data
        "to_empty": empty.to_empty(device="cpu"),
        "assign": assigned,
        "double": make().double(),
    }.items():
        assert marked(other) == names, kind
