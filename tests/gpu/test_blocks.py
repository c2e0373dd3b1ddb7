"""The blocks on a GPU: WKV6 and SSD against float64, and layers against a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import triton

from quasar_kernels.blocks import HybridBlock
from quasar_kernels.blocks.chunked import decayed_attention
from quasar_kernels.blocks.ssd import OPERATOR as SSD
from quasar_kernels.blocks.ssd import ssd
from quasar_kernels.blocks.ssd_triton.launch import ssd_triton
from quasar_kernels.blocks.wkv6 import OPERATOR as WKV6
from quasar_kernels.blocks.wkv6 import SHORT, wkv6
from quasar_kernels.blocks.wkv6_cuda.launch import wkv6_cuda
from quasar_kernels.blocks.wkv6_triton.launch import wkv6_triton
from quasar_kernels.decay_reference import ssd_recurrence, wkv6_recurrence
from quasar_kernels.reference import relative_rms
from tests.gpu.calls import ON_CUDA_KERNELS, packed
from tests.quasar_kernels.blocks.calls import Operator, ssd_inputs, wkv6_inputs
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.layer.steps import step
from tests.quasar_kernels.tolerances import (
    ADVERSARIAL,
    BETA_GRADIENT,
    GRADIENT,
    OPERATOR,
    RECURRENCE,
)

pytestmark = ON_CUDA_KERNELS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GPU = torch.device("cuda")
BY_FLA = {FP32: 1e-2, BF16: 3e-2}
"""Limits of fla's kernels: their fp32 products are tf32, and decays' gradients are differences of
sums over whole sequences."""
PACKED = [0, 1, 200, 64, 0, 735]


def draw_wkv6(T, K=64, V=None, B=1, H=4, **options):
    """Return WKV6's inputs on the GPU."""
    return [x.cuda() for x in wkv6_inputs(T, B, H, K, V or K, **options)]


def draw_ssd(T, N=64, P=64, B=1, H=4, **options):
    """Return SSD's inputs on the GPU."""
    return [x.cuda() for x in ssd_inputs(T, B, H, P, 2, N, **options)]


def exact_wkv6(r, k, v, w, u, state=None, bounds=None):
    """Compute WKV6 in float64; long sequences by `decayed_attention`, which CPU tests check."""
    oracle = wkv6_recurrence if r.shape[1] <= 200 else decayed_attention
    state = None if state is None else state.double()
    return oracle(*(x.double() for x in (r, k, v, w, u)), state, bounds)


def exact_ssd(x, dt, A, B, C, D, state=None, bounds=None):
    """Compute SSD in float64, like `exact_wkv6`."""
    if x.shape[1] <= 200:
        return ssd_recurrence(x, dt, A, B, C, D, state, bounds)
    x, dt, A, B, C, D = (y.double() for y in (x, dt, A, B, C, D))
    q, k = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (C, B))
    state = None if state is None else state.double()
    y, final = decayed_attention(q, k, x * dt[..., None], (dt * A)[..., None], None, state, bounds)
    return y + D[:, None] * x, final


TRITON = {
    "wkv6": Operator(wkv6_triton, exact_wkv6, draw_wkv6, (4, 64, 64), 5),
    "ssd": Operator(ssd_triton, exact_ssd, draw_ssd, (4, 64, 64), 2),
}
operators = pytest.mark.parametrize("operator", TRITON.values(), ids=TRITON)


def noise(*shape):
    return torch.randn(*shape, device="cuda")


def with_exact(operator, x, bounds=None):
    """Return the results and all gradients, of the operator and of float64."""
    return with_float64(
        lambda *y: operator.call(*y, bounds), lambda *y: operator.exact(*y, bounds), *x
    )


@pytest.mark.parametrize(
    ("name", "dtype", "decay", "segments"),
    [
        ("wkv6", BF16, 0.001, None),
        *(("wkv6", FP32, decay, segments) for decay, segments in ((0.1, 1), (0.001, 40))),
        *(("ssd", FP32, 1.0, segments) for segments in (1, 40)),
    ],
)
def test_long_sequences_in_any_number_of_segments(name, dtype, decay, segments):
    x = TRITON[name].inputs(30_000, dtype=dtype, decay=decay)
    check(TRITON[name].call(*x, segments=segments), TRITON[name].exact(*x), OPERATOR[dtype])


@pytest.mark.parametrize(
    ("name", "dtype", "K", "V", "lengths"),
    [
        ("wkv6", BF16, 32, 32, None),
        ("wkv6", BF16, 128, 128, PACKED),
        ("wkv6", FP16, 64, 64, PACKED),
        ("wkv6", FP32, 128, 128, None),
        ("ssd", BF16, 24, 64, PACKED),
        ("ssd", BF16, 96, 64, None),
        ("ssd", BF16, 128, 128, PACKED),
        ("ssd", FP16, 64, 32, None),
        ("ssd", FP32, 16, 64, PACKED),
        ("ssd", FP32, 128, 128, None),
    ],
)
def test_gradients(name, dtype, K, V, lengths):
    """Compare kernels with tiles that no other test compiles, or with packed sequences."""
    T, N = (1500, 1) if lengths is None else (sum(lengths), len(lengths))
    bounds = None if lengths is None else packed(lengths)
    x = [*TRITON[name].inputs(T, K, V, dtype=dtype), noise(N, 4, K, V)]
    found, wanted = with_exact(TRITON[name], x, bounds)
    if name == "ssd" and dtype != FP32:
        # the terms of A's gradient cancel, so 16-bit inputs leave fewer digits
        check([found.pop(4)], [wanted.pop(4)], BETA_GRADIENT)
    check(found, wanted, GRADIENT[dtype])


@operators
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("decay", [0.0, 1e-3, 3.5, 30.0, 1e6])
def test_any_decay(operator, dtype, decay):
    found, wanted = with_exact(operator, operator.inputs(1000, dtype=dtype, decay=decay))
    assert all(torch.isfinite(y).all() for y in found)
    limit = max(OPERATOR[dtype], GRADIENT[dtype])
    if decay < 10:
        check(found, wanted, limit)
    else:  # the decays' gradients vanish, and exponents of hundreds lose digits in fp32
        sure = operator.steady
        check(found[:sure], wanted[:sure], max(limit, ADVERSARIAL))


def test_strong_decays_do_not_reduce_the_precision_of_neighbours():
    r, k, v, w, u = draw_wkv6(500, decay=0.01)
    w[:, 5::20] = -1e6
    w[:, 50] = float("-inf")
    check(wkv6_triton(r, k, v, w, u), exact_wkv6(r, k, v, w.clamp(min=-1e6), u), OPERATOR[FP32])


def part(x, tokens):
    """Return the inputs of some tokens."""
    return [y[:, tokens] if y.ndim > 2 else y for y in x]


@operators
def test_halves_equal_the_whole(operator):
    x = operator.inputs(3000, dtype=FP32)
    first, state = operator.call(*part(x, slice(1234)))
    second, last = operator.call(*part(x, slice(1234, None)), state)
    whole = [y.double() for y in operator.call(*x)]
    check((torch.cat([first, second], 1), last), whole, 1e-5)


@operators
def test_later_tokens_do_not_change_earlier_ones_and_equal_calls_agree(operator):
    x = operator.inputs(3000, dtype=BF16)
    leaves = [y.requires_grad_() for y in x]
    runs = []
    for _ in range(2):
        o, _ = operator.call(*leaves)
        runs.append([o, *torch.autograd.grad(o.float().square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    turned = (torch.cat([y[:, :1500], y[:, 1500:].flip(1)], 1) if y.ndim > 2 else y for y in x)
    assert torch.equal(o[:, :1500], operator.call(*turned)[0][:, :1500])


def replayed(call):
    """Capture a call; return its results, and the function that replays it."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return results, graph.replay


@operators
def test_launches_can_be_captured(operator):
    x = operator.inputs(2000, dtype=BF16)
    (o, _), replay = replayed(lambda: operator.call(*x))
    x[1].mul_(0.5)
    replay()
    assert torch.equal(o, operator.call(*x)[0])


CUDA = TRITON["wkv6"]._replace(call=wkv6_cuda)


@operators
def test_single_tokens_equal_the_recurrence_and_can_be_captured(operator):
    x, found = operator.inputs(20, B=3, dtype=BF16), []
    token, state = [y.clone() for y in part(x, slice(1))], torch.zeros(3, 4, 64, 64, device="cuda")
    (o, final), replay = replayed(lambda: operator.call(*token, state))
    for t in range(20):
        for held, y in zip(token, part(x, slice(t, t + 1)), strict=True):
            held.copy_(y)
        replay()
        found.append(o.clone())
        state.copy_(final)
    check((torch.cat(found, 1), state), operator.exact(*x), RECURRENCE[BF16])


@pytest.mark.parametrize(
    ("dtype", "width", "lengths"),
    [
        (BF16, 64, [0, 1, 33, 64, 0, 135]),
        (BF16, 128, None),
        (FP16, 32, None),
        (FP32, 128, [0, 1, 33, 64, 0, 135]),
    ],
)
def test_gradients_by_cuda(dtype, width, lengths):
    T, B, N = (200, 2, 2) if lengths is None else (sum(lengths), 1, len(lengths))
    bounds = None if lengths is None else packed(lengths)
    x = [*draw_wkv6(T, width, B=B, dtype=dtype), noise(N, 4, width, width)]
    limit = RECURRENCE[dtype] if dtype != FP32 else GRADIENT[FP32]
    check(*with_exact(CUDA, x, bounds), limit)


@pytest.mark.parametrize("decay", [0.0, 1e-4, 3.5, 30.0, 1e6])
def test_any_decay_by_cuda(decay):
    x = [*draw_wkv6(100, H=2, dtype=FP32, decay=decay), torch.zeros(1, 2, 64, 64, device="cuda")]
    found, wanted = with_exact(CUDA, x)
    check(found[:5], wanted[:5], GRADIENT[FP32])
    assert all(torch.isfinite(y).all() for y in found)


def test_decoding_by_cuda_equals_the_recurrence_and_can_be_captured():
    x, state = draw_wkv6(20, B=3, dtype=BF16), torch.zeros(3, 4, 64, 64, device="cuda")
    token = [y[:, :1].clone() for y in x[:4]]
    (o, _), replay = replayed(lambda: wkv6_cuda(*token, x[4], state, in_place=True))
    state.zero_()
    found = []
    for t in range(20):
        for held, y in zip(token, x, strict=False):
            held.copy_(y[:, t : t + 1])
        replay()
        found.append(o.clone())
    check((torch.cat(found, 1), state), exact_wkv6(*x), RECURRENCE[BF16])


def test_cuda_computes_short_calls(monkeypatch):
    monkeypatch.setenv("QUASAR_WKV6_BACKEND", "cuda")
    x = draw_wkv6(SHORT[-1], dtype=BF16)
    assert WKV6.backend(GPU, BF16, width=64, tokens=SHORT[-1]).name == "cuda"
    assert torch.equal(wkv6(*x)[0], wkv6_cuda(*x)[0])
    assert WKV6.backend(GPU, BF16, width=64, tokens=SHORT[-1]).name == "cuda"  # no fallback


def refuses_gated_backward() -> bool:
    """Return whether fla's simple GLA has no backward pass with this Triton and GPU."""
    major, minor, patch = (int(n) for n in triton.__version__.split("+")[0].split(".")[:3])
    hopper = torch.cuda.get_device_capability()[0] == 9
    return hopper and (3, 4, 0) <= (major, minor, patch) < (3, 7, 1)


@pytest.mark.parametrize(
    ("operator", "name", "dtype", "lengths"),
    [
        ("wkv6", "cuda", FP32, None),
        ("wkv6", "triton", BF16, [100, 1, 299]),
        ("wkv6", "fla-core", BF16, [100, 1, 299]),
        ("wkv6", "torch", FP32, [100, 1, 299]),
        ("ssd", "triton", BF16, [100, 1, 299]),
        ("ssd", "fla-core", BF16, [100, 1, 299]),
        ("ssd", "torch", FP32, [100, 1, 299]),
    ],
)
def test_every_implementation(monkeypatch, operator, name, dtype, lengths):
    if (operator, name) == ("ssd", "fla-core") and refuses_gated_backward():
        pytest.skip("fla's simple GLA has no backward pass with this Triton on Hopper")
    monkeypatch.setenv(f"QUASAR_{operator.upper()}_BACKEND", name)
    bounds, N = (None, 1) if lengths is None else (packed(lengths), len(lengths))
    public, chosen = {"wkv6": (wkv6, WKV6), "ssd": (ssd, SSD)}[operator]
    x = [*TRITON[operator].inputs(400, dtype=dtype), noise(N, 4, 64, 64)]
    call = {"packed": lengths is not None, "width": 64}
    assert chosen.backend(GPU, dtype, **call).name == name
    found, wanted = with_exact(TRITON[operator]._replace(call=public), x, bounds)
    assert chosen.backend(GPU, dtype, **call).name == name  # no fallback
    check(found, wanted, BY_FLA[dtype] if name == "fla-core" else GRADIENT[dtype])


def test_a_block_gives_the_same_results_on_a_gpu_and_a_cpu():
    layer = HybridBlock(128, 2, mixers=("rwkv6", "mamba2", "quasar"), fusion="gated")
    on_gpu = copy.deepcopy(layer).cuda()
    x, do = torch.randn(2, 2, 200, 128)
    wanted, found = step(layer, x, do), step(on_gpu, x.cuda(), do.cuda())
    assert all((found[n] is None) == (y is None) for n, y in wanted.items())
    pairs = {
        n: (found[n].cpu(), y.double()) for n, y in wanted.items() if y is not None and y.any()
    }
    errors = {name: relative_rms(*pair) for name, pair in pairs.items()}
    bad = {name: f"{e:.1e}" for name, e in errors.items() if e > 1e-2}  # fla's products are tf32
    assert not bad


def test_backends_of_a_block():
    block = HybridBlock(width=128, heads=2, mixers=("rwkv6", "mamba2", "quasar")).cuda()
    found = block.backends(BF16)
    assert found["rwkv6"].name == "triton"
    assert found["mamba2"].name in ("mamba_ssm", "triton")
    assert found["quasar"].name != "torch"
