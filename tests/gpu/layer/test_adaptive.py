"""The adaptive layer on a GPU against float64."""

import pytest
import torch
from fla.layers.quasar import QuasarCache
from fla.layers.quasar_adaptive import AdaptiveQuasarAttention
from fla.ops.quasar.layer import gradients, operator_inputs, paths
from fla.ops.quasar.layer.adaptive import FORWARD
from fla.ops.quasar.layer.adaptive_memory import SAVING
from fla.ops.quasar.layer.adaptive_training import BACKWARD
from fla.ops.quasar.layer.gate_and_norm import _gate_and_norm
from fla.ops.quasar.layer.graphs import _Graph, _owners
from fla.ops.quasar.triton_kernels import launch

from quasar_kernels.reference import relative_rms
from tests.gpu.calls import ON_CUDA_KERNELS, packed
from tests.quasar_kernels.layer.steps import exact_step

pytestmark = ON_CUDA_KERNELS

BF16, FP16 = torch.bfloat16, torch.float16
LIMITS = {BF16: (8e-3, 1.5e-2), FP16: (1.5e-3, 3e-3)}
"""Of the output and of gradients."""
CANCELS = {"A_log", "dt_bias"}
"""Their gradients are sums of terms of both signs, so their errors are up to twice as large."""


def make(hidden=512, head_dim=128, heads=8):
    torch.manual_seed(0)
    layer = AdaptiveQuasarAttention(hidden, head_dim, heads).cuda()
    with torch.no_grad():
        layer.dt_bias.normal_()
    return layer


def step(layer, x, dy, dtype=BF16, **options):
    """Return the output and all gradients of a step under autocast."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast("cuda", dtype):
        y, _ = layer(x, **options)
    y.backward(dy.to(y.dtype))
    named = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **named}


@pytest.mark.parametrize(
    ("dtype", "size", "head_dim", "keep"),
    [
        (BF16, 1.0, 128, "3072"),
        (BF16, 1e-12, 64, "0"),
        (BF16, 1e12, 128, "0"),
        (FP16, 1.0, 128, "0"),
    ],
)
def test_a_step_matches_float64(monkeypatch, dtype, size, head_dim, keep):
    monkeypatch.setenv("QUASAR_KEEP_MIB", keep)
    layer, (x, dy) = make(head_dim=head_dim), torch.randn(2, 2, 1500, 512, device="cuda")
    dy = (size * dy).to(dtype)
    wanted, found = exact_step(layer, x, dy), step(layer, x, dy, dtype)
    errors = {name: relative_rms(g, wanted[name]) for name, g in found.items()}
    output, gradient = LIMITS[dtype]
    limits = {n: output if n == "y" else gradient * (1 + (n in CANCELS)) for n in errors}
    assert all(error <= limits[n] for n, error in errors.items()), errors


def test_repeated_steps_are_equal_and_packed_ones_as_separate_calls():
    layer, lengths = make(), [1200, 3, 0, 129, 900]
    x, dy = torch.randn(2, 1, sum(lengths), 512, device="cuda")
    bounds = packed(lengths)
    first, again = (step(layer, x, dy, cu_seqlens=bounds) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    for n, part in enumerate(x.split(lengths, 1)):
        if part.numel():
            alone = step(layer, part, dy.split(lengths, 1)[n])
            for name in ("y", "x"):
                together = first[name].split(lengths, 1)[n]
                # both are rounded to bf16 several times
                assert relative_rms(together, alone[name].double()) <= 1.5e-2, (n, name)


@pytest.mark.parametrize(
    ("B", "T", "bounds"), [(1, 300, None), (2, 6000, None), (1, 10_000, [3000, 0, 7000])]
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_replays_have_the_bits_of_launches(monkeypatch, B, T, bounds, dtype):
    monkeypatch.setattr(paths, "MIN_WIDE_TILES", 1)
    layer, (x, dy) = make(), torch.randn(2, B, T, 512, device="cuda")
    cos, sin = torch.randn(2, 1, 1, T, 64, device="cuda")
    dy = dy.to(dtype)
    options = {"cos": cos, "sin": sin, **({} if bounds is None else {"cu_seqlens": packed(bounds)})}

    def both():
        with torch.no_grad(), torch.autocast("cuda", dtype):
            alone, _ = layer(x, **options)
        return {"alone": alone, **step(layer, x, dy, dtype, **options)}

    for _ in range(2):
        with monkeypatch.context() as m:
            m.setenv("QUASAR_GRAPHS", "0")
            wanted = both()
        for n in range(8):  # with saved results, addresses repeat only after some steps
            found = both()
            different = [n for n, value in wanted.items() if not torch.equal(found[n], value)]
            assert not different, (n, different)
            del found
        with torch.no_grad():  # graphs contain addresses, no values
            for p in (x, dy, *layer.parameters()):
                p.mul_(0.9)
    operations = {key[4][0] for key, entry in _owners[layer].items() if isinstance(entry, _Graph)}
    assert BACKWARD in operations
    assert (SAVING in operations) == (T > 300)
    assert (FORWARD in operations) == (bounds is None)


@pytest.mark.parametrize("B", [1, 3])
def test_decoded_tokens_equal_one_call(B):
    layer, x, cache = make(), torch.randn(B, 620, 512, device="cuda"), QuasarCache()
    layer.layer_idx = 0
    cos, sin = torch.randn(2, 1, 1, 620, 64, device="cuda")
    lengths, outputs = [600, *[1] * 8, 5, 7], []
    with torch.no_grad(), torch.autocast("cuda", BF16):
        whole, _ = layer(x, cos=cos, sin=sin)
        parts = zip(x.split(lengths, 1), cos.split(lengths, 2), sin.split(lengths, 2), strict=True)
        for part, *tables in parts:
            options = dict(zip(("cos", "sin"), tables, strict=True))
            outputs.append(layer(part, past_key_values=cache, use_cache=True, **options)[0])
    errors = [
        relative_rms(a, b.double()) for a, b in zip(outputs, whole.split(lengths, 1), strict=True)
    ]
    assert max(errors) <= 2.5e-2, errors  # single tokens, both rounded to bf16 several times
    assert any(isinstance(entry, _Graph) for entry in _owners[layer].values())


def test_bad_numbers_stay_visible():
    layer, (x, dy) = make(), torch.randn(2, 1, 1000, 512, device="cuda")
    dy[0, 500, 3] = float("nan")
    assert step(layer, x, dy)["x"].isnan().any()
    x[0, 500, 3] = float("nan")
    assert step(layer, x, dy)["y"].isnan().any()


def test_the_first_step_compiles_its_kernels_ahead(monkeypatch):
    launchers = [gradients._conv_silu_grad, gradients._gated_rmsnorm_grad, _gate_and_norm]
    launchers += [operator_inputs._forward, operator_inputs._backward]
    for launcher in launchers:
        monkeypatch.setattr(launcher, "_compiled", {})
        monkeypatch.setattr(launcher, "_ahead", {})
    monkeypatch.setattr(launch, "_known", set())
    monkeypatch.setattr(paths, "MIN_WIDE_TILES", 1)
    layer, (x, dy) = make(), torch.randn(2, 1, 4096, 512, device="cuda")
    step(layer, x, dy)
    assert [len(launcher._compiled) for launcher in launchers] == [1] * 5
    assert not any(launcher._ahead for launcher in launchers)  # each was waited for
