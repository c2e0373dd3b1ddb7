"""The blocks on a GPU: WKV6 and SSD against float64, the layers as on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import triton

from quasar_kernels.blocks import HybridBlock, Mamba2, RWKV6TimeMixing
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
from tests.gpu.calls import ON_CUDA_KERNELS
from tests.quasar_kernels.blocks.calls import results_and_gradients, ssd_inputs, wkv6_inputs
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR, RECURRENCE

pytestmark = ON_CUDA_KERNELS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GPU = torch.device("cuda")
BY_FLA = {FP32: 1e-2, BF16: 3e-2}
"""What the host library's kernels are held to: their fp32 products are tf32, and decays' gradients
are differences of sums over whole sequences."""
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
widths = pytest.mark.parametrize("width", [32, 64, 128])


def draw(T, width=64, B=1, H=4, **options):
    """WKV6's inputs on the GPU."""
    return [x.cuda() for x in wkv6_inputs(T, B, H, width, width, **options)]


def exact(*x):
    """WKV6 in float64; long sequences by halved chunks, which a CPU's tests hold to the walk."""
    bounds = x[6] if len(x) > 6 else None
    state = x[5] if len(x) > 5 else None
    wide = [y.double() for y in x[:5]]
    if x[0].shape[1] <= 200:
        return wkv6_recurrence(*wide, state, bounds)
    return decayed_attention(*wide, None if state is None else state.double(), bounds)


def check(found, wanted, limit):
    """Every tensor is near float64's; the failure names all errors."""
    errors = [relative_rms(x, y) for x, y in zip(found, wanted, strict=True)]
    assert all(torch.isfinite(x).all() for x in found)
    assert max(errors) <= limit, [f"{e:.1e}" for e in errors]


@dtypes
@widths
@pytest.mark.parametrize(("T", "B"), [(1, 2), (31, 1), (300, 3), (2000, 2)])
def test_values(dtype, width, T, B):
    x = [*draw(T, width, B, dtype=dtype), torch.randn(B, 4, width, width, device="cuda")]
    check(wkv6_triton(*x), exact(*x), OPERATOR[dtype])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("decay", [0.001, 0.1])
def test_long_sequences(dtype, decay):
    x = draw(30_000, H=8, dtype=dtype, decay=decay)
    check(wkv6_triton(*x), exact(*x), OPERATOR[dtype])


@dtypes
@widths
@pytest.mark.parametrize("lengths", [None, [0, 1, 200, 64, 0, 735]], ids=["one", "packed"])
def test_gradients(dtype, width, lengths):
    T, N = (1500, 1) if lengths is None else (sum(lengths), len(lengths))
    bounds = None if lengths is None else packed(lengths, "cuda")
    x = [*draw(T, width, dtype=dtype), torch.randn(N, 4, width, width, device="cuda")]
    found = results_and_gradients(lambda *y: wkv6_triton(*y, bounds), x)
    wanted = results_and_gradients(lambda *y: exact(*y, bounds), x, torch.float64)
    check(found, wanted, GRADIENT[dtype])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("decay", [0.0, 1e-4, 1.0, 3.5, 30.0, 1000.0, 1e6])
def test_any_decay(dtype, decay):
    x = draw(1000, H=2, dtype=dtype, decay=decay)
    found = results_and_gradients(wkv6_triton, x)
    wanted = results_and_gradients(exact, x, torch.float64)
    assert all(torch.isfinite(y).all() for y in found)
    check(found[:5], wanted[:5], max(OPERATOR[dtype], GRADIENT[dtype]))
    if decay < 10:  # beyond, the decays' own gradients are rounding
        check(found[5:], wanted[5:], max(OPERATOR[dtype], GRADIENT[dtype]))


def test_strong_decays_cost_their_neighbours_no_digits():
    r, k, v, w, u = draw(500, decay=0.01)
    w[:, 5::20] = -1e6
    w[:, 50] = float("-inf")
    check(wkv6_triton(r, k, v, w, u), exact(r, k, v, w.clamp(min=-1e6), u), OPERATOR[FP32])


@pytest.mark.parametrize("segments", [1, 3, 40])
def test_any_number_of_segments(segments):
    x = draw(5000, dtype=FP32)
    check(wkv6_triton(*x, segments=segments), exact(*x), OPERATOR[FP32])


def test_halves_equal_the_whole():
    x = draw(3000, dtype=FP32)
    whole, final = wkv6_triton(*x)
    first, state = wkv6_triton(*(y[:, :1234] for y in x[:4]), x[4])
    rest, last = wkv6_triton(*(y[:, 1234:] for y in x[:4]), x[4], state)
    check((torch.cat([first, rest], 1), last), (whole.double(), final.double()), 1e-5)


def test_later_tokens_do_not_change_earlier_ones_and_calls_repeat():
    x = draw(3000, dtype=BF16)
    o, _ = wkv6_triton(*x)
    again, _ = wkv6_triton(*x)
    changed = [torch.cat([y[:, :1500], y[:, 1500:].flip(1)], 1) for y in x[:4]]
    assert torch.equal(o, again)
    assert torch.equal(o[:, :1500], wkv6_triton(*changed, x[4])[0][:, :1500])


def test_launches_can_be_captured():
    x = draw(2000, dtype=BF16)
    wkv6_triton(*x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = wkv6_triton(*x)
    x[2].mul_(-1)
    graph.replay()
    assert torch.equal(o, wkv6_triton(*x)[0])


@dtypes
@widths
@pytest.mark.parametrize("lengths", [None, [0, 1, 33, 64, 0, 135]], ids=["one", "packed"])
def test_gradients_by_cuda(dtype, width, lengths):
    T, B, N = (200, 2, 2) if lengths is None else (sum(lengths), 1, len(lengths))
    bounds = None if lengths is None else packed(lengths, "cuda")
    x = [*draw(T, width, B, dtype=dtype), torch.randn(N, 4, width, width, device="cuda")]
    found = results_and_gradients(lambda *y: wkv6_cuda(*y, bounds), x)
    wanted = results_and_gradients(lambda *y: exact(*y, bounds), x, torch.float64)
    check(found, wanted, RECURRENCE[dtype] if dtype != FP32 else GRADIENT[FP32])


@pytest.mark.parametrize("decay", [0.0, 1e-4, 3.5, 30.0, 1e6])
def test_any_decay_by_cuda(decay):
    x = draw(100, H=2, dtype=FP32, decay=decay)
    found = results_and_gradients(wkv6_cuda, x)
    wanted = results_and_gradients(exact, x, torch.float64)
    check(found[:5], wanted[:5], GRADIENT[FP32])
    assert all(torch.isfinite(y).all() for y in found)


def test_decoding_by_cuda_is_one_walk_and_can_be_captured():
    x, state = draw(20, B=3, dtype=BF16), torch.zeros(3, 4, 64, 64, device="cuda")
    token = [y[:, :1].clone() for y in x[:4]]
    wkv6_cuda(*token, x[4])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = wkv6_cuda(*token, x[4], state, in_place=True)
    found = []
    for t in range(20):
        for held, y in zip(token, x, strict=False):
            held.copy_(y[:, t : t + 1])
        graph.replay()
        found.append(o.clone())
    check((torch.cat(found, 1), state), exact(*x), RECURRENCE[BF16])


def test_short_calls_go_to_cuda(monkeypatch):
    monkeypatch.setenv("QUASAR_WKV6_BACKEND", "cuda")
    x = draw(SHORT[-1], dtype=BF16)
    assert WKV6.backend(GPU, BF16, width=64, tokens=SHORT[-1]).name == "cuda"
    assert torch.equal(wkv6(*x)[0], wkv6_cuda(*x)[0])
    assert WKV6.backend(GPU, BF16, width=64, tokens=SHORT[-1]).name == "cuda"  # it did not fail


@pytest.mark.parametrize("name", ["cuda", "triton", "fla-core", "torch"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("lengths", [None, [100, 1, 299]], ids=["one", "packed"])
def test_every_implementation_of_wkv6(monkeypatch, name, dtype, lengths):
    monkeypatch.setenv("QUASAR_WKV6_BACKEND", name)
    bounds, N = (None, 1) if lengths is None else (packed(lengths, "cuda"), len(lengths))
    x = [*draw(400, dtype=dtype), torch.randn(N, 4, 64, 64, device="cuda")]
    assert WKV6.backend(GPU, dtype, width=64).name == name
    found = results_and_gradients(lambda *y: wkv6(*y, bounds), x)
    assert WKV6.backend(GPU, dtype, width=64).name == name  # nothing fell back meanwhile
    wanted = results_and_gradients(lambda *y: exact(*y, bounds), x, torch.float64)
    check(found, wanted, BY_FLA[dtype] if name == "fla-core" else GRADIENT[dtype])


@pytest.mark.parametrize("name", ["triton", "fla-core", "torch"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("lengths", [None, [100, 1, 299]], ids=["one", "packed"])
def test_every_implementation_of_ssd(monkeypatch, name, dtype, lengths):
    if name == "fla-core":
        refuses_gated_backward()
    monkeypatch.setenv("QUASAR_SSD_BACKEND", name)
    bounds, N = (None, 1) if lengths is None else (packed(lengths, "cuda"), len(lengths))
    x = [y.cuda() for y in ssd_inputs(400, H=4, P=64, G=2, N=64, dtype=dtype)]
    x.append(torch.randn(N, 4, 64, 64, device="cuda"))
    found = results_and_gradients(lambda *y: ssd(*y, bounds), x)
    assert SSD.backend(GPU, dtype, lengths is not None).name == name
    wanted = results_and_gradients(lambda *y: ssd_recurrence(*y, bounds), x, torch.float64)
    check(found, wanted, BY_FLA[dtype] if name == "fla-core" else GRADIENT[dtype])


def draw_ssd(T, N=64, P=64, B=1, H=4, G=2, **options):
    """SSD's inputs on the GPU."""
    return [x.cuda() for x in ssd_inputs(T, B, H, P, G, N, **options)]


def exact_ssd(x, dt, A, B, C, D, state=None, bounds=None):
    """SSD in float64; long sequences by halved chunks, which a CPU's tests hold to the walk."""
    if x.shape[1] <= 200:
        return ssd_recurrence(x, dt, A, B, C, D, state, bounds)
    x, dt, A, B, C, D = (y.double() for y in (x, dt, A, B, C, D))
    q, k = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (C, B))
    state = None if state is None else state.double()
    y, final = decayed_attention(q, k, x * dt[..., None], (dt * A)[..., None], None, state, bounds)
    return y + D[:, None] * x, final


@dtypes
@pytest.mark.parametrize(
    ("N", "P"), [(16, 64), (24, 64), (64, 32), (64, 64), (64, 128), (96, 64), (128, 64), (128, 128)]
)
@pytest.mark.parametrize("lengths", [None, [0, 1, 200, 64, 0, 735]], ids=["one", "packed"])
def test_gradients_of_ssd(dtype, N, P, lengths):
    T, count = (1500, 1) if lengths is None else (sum(lengths), len(lengths))
    bounds = None if lengths is None else packed(lengths, "cuda")
    x = [*draw_ssd(T, N, P, dtype=dtype), torch.randn(count, 4, N, P, device="cuda")]
    found = results_and_gradients(lambda *y: ssd_triton(*y, bounds), x)
    again = results_and_gradients(lambda *y: ssd_triton(*y, bounds), x)
    wanted = results_and_gradients(lambda *y: exact_ssd(*y, bounds), x, torch.float64)
    check(found, wanted, GRADIENT[dtype])
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("rate", [0.0, 1e-3, 3.5, 100.0, 1e6])
def test_any_decay_of_ssd(dtype, rate):
    x = draw_ssd(1000, dtype=dtype, rate=rate)
    found = results_and_gradients(ssd_triton, x)
    wanted = results_and_gradients(exact_ssd, x, torch.float64)
    assert all(torch.isfinite(y).all() for y in found)
    check(found[:2], wanted[:2], OPERATOR[dtype])
    if rate < 10:  # beyond, the decays' own gradients are rounding
        check(found[2:], wanted[2:], GRADIENT[dtype])


@pytest.mark.parametrize("segments", [1, 3, 40])
def test_any_number_of_segments_of_ssd(segments):
    x = draw_ssd(30_000, H=8, dtype=BF16)
    check(ssd_triton(*x, segments=segments), exact_ssd(*x), OPERATOR[BF16])


@pytest.mark.parametrize("name", ["wkv6", "ssd"])
def test_single_tokens_are_the_walk_and_can_be_captured(name):
    if name == "wkv6":
        x, walk = draw(20, B=3, dtype=BF16), exact
        r, k, v, w, u = x

        def call(t, state):
            return wkv6_triton(*(y[:, t : t + 1].contiguous() for y in (r, k, v, w)), u, state)
    else:
        x, walk = draw_ssd(20, B=3, dtype=BF16), exact_ssd

        def call(t, state):
            one = [y[:, t : t + 1].contiguous() for y in (x[0], x[1], x[3], x[4])]
            return ssd_triton(one[0], one[1], x[2], one[2], one[3], x[5], state)

    state, found = torch.zeros(3, 4, 64, 64, device="cuda"), []
    for t in range(20):
        o, state = call(t, state)
        found.append(o)
    check((torch.cat(found, 1), state), walk(*x), RECURRENCE[BF16])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = call(0, None)
    graph.replay()
    assert torch.equal(o, found[0])


def refuses_gated_backward() -> None:
    """Skip where the host library's simple GLA refuses to go backward."""
    major, minor, patch = (int(n) for n in triton.__version__.split("+")[0].split(".")[:3])
    hopper = torch.cuda.get_device_capability()[0] == 9
    if hopper and (3, 4, 0) <= (major, minor, patch) < (3, 7, 1):
        pytest.skip("fla-core's simple GLA refuses to go backward with this Triton on Hopper")


@pytest.mark.parametrize(
    "make",
    [
        lambda: RWKV6TimeMixing(128, 2, layer=1, layers=4),
        lambda: Mamba2(128, 4, state=64),
        lambda: HybridBlock(width=128, heads=2, mixers=("rwkv6", "mamba2"), layer=1, layers=4),
        lambda: HybridBlock(128, 2, mixers=("rwkv6", "mamba2", "quasar"), fusion="gated"),
    ],
    ids=["rwkv6", "mamba2", "pair", "all three"],
)
def test_a_layer_gives_on_a_gpu_what_it_gives_on_a_cpu(make):
    layer = make()
    there = copy.deepcopy(layer).cuda()
    x = torch.randn(2, 200, 128)
    do = torch.randn(2, 200, 128)

    def run(module, x, do):
        x = x.detach().requires_grad_()
        y, _ = module(x)
        y.backward(do)
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return {"y": y.detach(), "x": x.grad, **grads}

    wanted, found = run(layer, x, do), run(there, x.cuda(), do.cuda())
    assert wanted.keys() == found.keys()
    errors = {
        n: relative_rms(found[n].cpu(), wanted[n].double()) for n in wanted if wanted[n].any()
    }
    bad = {name: f"{e:.1e}" for name, e in errors.items() if e > 1e-2}  # fla's products are tf32
    assert not bad


def test_a_block_says_what_runs():
    block = HybridBlock(width=128, heads=2, mixers=("rwkv6", "mamba2", "quasar")).cuda()
    found = block.backends(BF16)
    assert found["rwkv6"].name == "triton"
    assert found["mamba2"].name in ("mamba_ssm", "triton")
    assert found["quasar"].name != "torch"
