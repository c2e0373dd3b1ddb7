"""The delta rule, with and without decay, on a GPU: CUDA C++ and Triton against float64."""

import pytest
import torch
from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.operator_types import ScanInputs

from quasar_kernels.delta_reference import delta_chunked, delta_recurrence
from quasar_kernels.reference import relative_rms
from tests.gpu.calls import ON_CUDA_KERNELS, PORTABLE
from tests.quasar_kernels.delta_rule.calls import chunk, inputs, recurrent, used, wide
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import common_key, packed
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR, RECURRENCE, RECURRENCE_STATE

pytestmark = ON_CUDA_KERNELS

BF16 = torch.bfloat16
gates = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
names = pytest.mark.parametrize("name", ["cuda", "triton"])


def draw(T, width=64, **options):
    """Return inputs on the GPU for heads of a width."""
    heads = options.pop("H", 512 // width)
    return inputs(T, H=heads, K=width, device="cuda", **{"dtype": BF16, **options})


@names
@gates
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    ("width", "T", "B"), [(64, 1, 1), (64, 1000, 3), (64, 30_000, 1), (128, 5000, 2)]
)
def test_values(monkeypatch, name, gated, dtype, width, T, B):
    monkeypatch.setenv("QUASAR_BACKEND", name)
    x = draw(T, width, B=B, dtype=dtype, decay=0.02)
    state = torch.randn(B, x.v.shape[2], width, width, device="cuda")
    found = chunk(x, gated, initial_state=state, output_final_state=True, scale=0.5)
    wanted = delta_chunked(*wide(used(x, gated)), state, scale=0.5)
    check(found, wanted, OPERATOR[dtype])


@names
@gates
@pytest.mark.parametrize(("width", "T", "group"), [(64, 3000, 1), (128, 1500, 1), (64, 1500, 3)])
@pytest.mark.parametrize("lengths", [None, [0, 1, 200, 64, 0, 735]])
def test_gradients(monkeypatch, name, gated, width, T, group, lengths):
    monkeypatch.setenv("QUASAR_BACKEND", name)
    cu = None if lengths is None else packed(lengths, "cuda")
    x = draw(T if lengths is None else sum(lengths), width, H=4, group=group, decay=0.05)
    sequences = 1 if lengths is None else len(lengths)
    state = torch.randn(sequences, 4 * group, width, width, device="cuda")
    count = 5 if gated else 4

    options = {"output_final_state": True, "scale": 0.5, "cu_seqlens": cu}

    def run(*leaves):
        y = type(x)(*leaves[:count], *x[count:])
        return chunk(y, gated, initial_state=leaves[-1], **options)

    def exact(*leaves):
        y = used(type(x)(*leaves[:count], *x[count:]), gated)
        return delta_chunked(*wide(y), leaves[-1], cu, scale=0.5)

    check(*with_float64(run, exact, *x[:count], state), GRADIENT[BF16])


def assert_gradients(x, scale):
    """Compare the gated rule's gradients, including g's, with float64."""

    def run(*leaves):
        return chunk(type(x)(*leaves), True, output_final_state=True, scale=scale)

    def exact(*leaves):
        return delta_chunked(*leaves, scale=scale)

    check(*with_float64(run, exact, *x), GRADIENT[BF16])


@names
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("decay", [0.0, 1e-3, 1.0, 5.0, 30.0])
def test_gradients_of_any_decay(monkeypatch, name, width, decay):
    monkeypatch.setenv("QUASAR_BACKEND", name)
    assert_gradients(draw(3000, width, H=4, decay=decay), width**-0.5)


@names
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_with_zero_step_sizes_and_resets_of_the_state(monkeypatch, name, width):
    monkeypatch.setenv("QUASAR_BACKEND", name)
    x = draw(3000, width, H=4, decay=0.02)
    x.beta[:, ::5] = 0
    forgets = torch.rand_like(x.g) < 0.02
    assert_gradients(x._replace(g=torch.where(forgets, -200.0, x.g)), 0.125)


@pytest.mark.parametrize("decay", [0.02, 0.1, 1.0])
def test_gradients_with_early_stops(monkeypatch, decay):
    monkeypatch.setenv("QUASAR_BACKEND", "cuda")
    monkeypatch.setattr(cuda_scan_bwd, "LONG", 1)
    x = draw(28_000, H=64, decay=decay)  # many heads, so a segment has more than LONG tokens
    program = cuda_scan.PROGRAM.load(cuda_scan.variant_of(x.q, ("-DQUASAR_DECAY",)))
    assert (
        cuda_scan.cut_segments(program, tuple(x.q.shape), x.q.device, None).length >= cuda_scan.LONG
    )
    assert_gradients(x, 0.125)


@names
@pytest.mark.parametrize("decay", [0.0, 1e-3, 5.0, 100.0])
def test_any_decay(monkeypatch, name, decay):
    monkeypatch.setenv("QUASAR_BACKEND", name)
    x = draw(100_000, decay=decay)
    o, _ = chunk(x, True)
    assert relative_rms(o, delta_chunked(*wide(x), scale=0.125)[0]) <= OPERATOR[BF16]


@pytest.mark.parametrize(
    ("name", "dtype", "limit"),
    [
        ("triton", torch.float32, 1e-5),
        ("triton", torch.float16, OPERATOR[torch.float16]),
        ("triton", BF16, OPERATOR[BF16]),
        ("cuda", torch.float16, OPERATOR[torch.float16]),
        ("cuda", BF16, OPERATOR[BF16]),
    ],
)
@pytest.mark.parametrize("width", [64, 128])
def test_strong_decays_leave_the_digits_of_later_weak_ones(monkeypatch, name, dtype, limit, width):
    monkeypatch.setenv("QUASAR_BACKEND", name)
    x = draw(4096, width, dtype=dtype)
    is_late = torch.arange(4096, device="cuda") % 16 >= 12  # weak after strong ones in each chunk
    x.g[:, ~is_late] = -110.0
    o, _ = chunk(x, True)
    wanted, _ = delta_chunked(*wide(x), scale=width**-0.5)
    assert relative_rms(o[:, is_late], wanted[:, is_late]) <= limit


@names
@gates
@pytest.mark.parametrize("place", ["k", "v"])
def test_nan_reaches_earlier_tokens_only_in_its_chunk(monkeypatch, name, gated, place):
    monkeypatch.setenv("QUASAR_BACKEND", name)
    x = draw(10_000)
    before, _ = chunk(x, gated)
    for t in (30, 1000, 7777):
        wrong = getattr(x, place).clone()
        wrong[:, t, 3, 5] = torch.nan
        after, _ = chunk(x._replace(**{place: wrong}), gated)
        early = max(0, t - 63)
        assert torch.equal(after[:, :early], before[:, :early]), t
        others = [n for n in range(before.shape[2]) if n != 3]
        assert torch.equal(after[:, :, others], before[:, :, others]), t
        assert not after[:, t:, 3].isfinite().all(-1).any()


@names
@gates
def test_similar_keys(monkeypatch, name, gated):
    monkeypatch.setenv("QUASAR_BACKEND", name)
    x = draw(20_000, decay=0.02)
    k = torch.nn.functional.normalize(common_key(x.k, 0.1).float(), dim=-1).to(BF16)
    x = x._replace(k=k)
    o, _ = chunk(x, gated)
    wanted, _ = delta_chunked(*wide(used(x, gated)), scale=0.125)
    assert relative_rms(o, wanted) <= 1e-2


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("options", [(), PORTABLE], ids=["wgmma", "mma"])
@pytest.mark.parametrize("width", [64, 128])
def test_every_path_of_the_cuda_kernels(gated, options, width):
    x = draw(10_000, width, decay=0.02)
    g = x.g if gated else None
    call = ScanInputs.of(*x[:4], g=g)
    steps = cuda_scan.step_options(call)
    program = cuda_scan.PROGRAM.load(cuda_scan.variant_of(x.q, steps + options))
    found = cuda_scan.forward(call, True, program=program)
    check(found[:2], delta_chunked(*wide(used(x, gated))), OPERATOR[BF16])


@pytest.mark.parametrize("options", [(), PORTABLE], ids=["wgmma", "mma"])
def test_every_path_of_the_gated_gradients(options):
    x = draw(5000, H=4, decay=0.02)
    variant = cuda_scan.variant_of(x.q, ("-DQUASAR_DECAY", *options))
    program = cuda_scan.PROGRAM.load(variant)
    _, _, saved = cuda_scan.forward(ScanInputs.of(*x[:4], g=x.g), program=program)
    do = torch.randn_like(x.q)
    program = cuda_scan_bwd.PROGRAM.load(variant)
    found = cuda_scan_bwd.backward(saved, do, program=program)
    leaves = [y.requires_grad_() for y in wide(x)]
    wanted = torch.autograd.grad(delta_chunked(*leaves)[0], leaves, do.double())
    check((*found[:4], found.g), wanted, GRADIENT[BF16])


@gates
def test_packed_calls_are_captured_once_their_bounds_are_known(gated):
    x, bounds = draw(600), packed([100, 200, 300], "cuda")
    expected, _ = chunk(x, gated, cu_seqlens=bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = chunk(x, gated, cu_seqlens=bounds)
    graph.replay()
    assert torch.equal(o, expected)


@gates
def test_windows_after_bursts(monkeypatch, gated):
    monkeypatch.setenv("QUASAR_BACKEND", "cuda")
    x = draw(200_000, decay=0.01)
    v = x.v.clone()
    for start in range(3000, 200_000, 20_000):
        v[:, start : start + 10] *= 8000
    x = x._replace(v=v)
    o, _ = chunk(x, gated)
    wanted, _ = delta_chunked(*wide(used(x, gated)), scale=0.125)
    rows = [y[0, :199_680].double().unflatten(0, (-1, 512)) for y in (o, wanted)]
    errors = (rows[0] - rows[1]).square().sum((1, 3)) / rows[1].square().sum((1, 3))
    assert errors.sqrt().max() <= 1.2e-2


@gates
def test_reruns_are_bitwise_equal(gated):
    x = draw(50_000)
    leaves = [y.requires_grad_() for y in x[: 5 if gated else 4]]
    results = []
    for _ in range(2):
        o, _ = chunk(type(x)(*leaves, *x[len(leaves) :]), gated)
        results.append([o, *torch.autograd.grad(o.float().square().sum(), leaves)])
    assert all(torch.equal(y, z) for y, z in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("gated", "option"), [(False, "-DQUASAR_READ_STEP"), (True, "-DQUASAR_DECAY")]
)
def test_the_cuda_kernels_compute_both_rules_in_both_directions(monkeypatch, gated, option):
    used = set()
    for direction, program, method in [
        ("forward", cuda_scan.PROGRAM, "find"),
        ("backward", cuda_scan_bwd.PROGRAM, "find_loaded"),
    ]:
        original = getattr(program, method)

        def find(variant, direction=direction, original=original):
            found = original(variant)
            if isinstance(found, LoadedProgram):
                used.add((direction, *variant.options))
            return found

        monkeypatch.setattr(program, method, find)
    x = draw(500)
    leaves = [y.requires_grad_() for y in x[: 5 if gated else 4]]
    o, _ = chunk(type(x)(*leaves, *x[len(leaves) :]), gated)
    torch.autograd.grad(o.sum(), leaves)
    assert {(direction, options[-1]) for direction, *options in used} == {
        ("forward", option),
        ("backward", option),
    }


@gates
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", RECURRENCE)
def test_decoding_in_place(gated, width, group, dtype):
    x = draw(1, width, B=16, H=2, group=group, dtype=dtype)
    state = torch.randn(16, 2 * group, width, width, device="cuda")
    expected, end = delta_recurrence(*wide(used(x, gated)), state, scale=0.5)
    o, final = recurrent(x, gated, initial_state=state, inplace_state=True, scale=0.5)
    assert final is state
    assert relative_rms(o, expected) <= RECURRENCE[dtype]
    assert relative_rms(state, end) <= RECURRENCE_STATE


@names
@pytest.mark.parametrize(
    "shape", [{"V": 96}, {"V": 32}, {"group": 2}, {"group": 3, "V": 128}], ids=str
)
def test_heads_of_other_shapes(monkeypatch, name, shape):
    monkeypatch.setenv("QUASAR_BACKEND", name)
    x = draw(700, H=2, **shape)
    found = chunk(x, True, output_final_state=True)
    check(found, delta_chunked(*wide(x), scale=0.125), OPERATOR[BF16])


@names
@pytest.mark.parametrize("call", [chunk, recurrent], ids=lambda f: f.__name__)
@pytest.mark.parametrize("width", [64, 128, 96])
def test_units_and_sigmoids_in_the_kernels(monkeypatch, name, call, width):
    """q, k and v are views of one projection; gradients reach all inputs."""
    if name == "cuda" and width == 96:
        pytest.skip("no CUDA kernels for heads of 96")
    monkeypatch.setenv("QUASAR_BACKEND", name)
    x = draw(700, width, H=4, B=2, decay=0.05)
    qkv = torch.randn(2, 700, 3, 4, width, device="cuda", dtype=BF16)
    logits = torch.randn(2, 4, 700, device="cuda", dtype=BF16)
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

    def run(qkv, g, logits):
        y = type(x)(*qkv.unbind(2), logits.mT, g)
        return call(y, True, **options, allow_neg_eigval=True)[0]

    def exact(qkv, g, logits):
        q, k, v = qkv.unbind(2)
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        return delta_chunked(q, k, v, 2 * logits.mT.sigmoid(), g, scale=width**-0.5)[0]

    check(*with_float64(run, exact, qkv, x.g, logits), GRADIENT[BF16])
