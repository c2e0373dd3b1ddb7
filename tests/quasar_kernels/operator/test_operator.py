"""The operator on CPUs, by chunks and token by token, against the float64 recurrence."""

import re

import pytest
import torch
from fla.ops.quasar import chunk_quasar, fused_recurrent_quasar
from fla.ops.quasar import chunk_torch as chunk_torch_module
from fla.ops.quasar.chunk_torch import chunk_quasar_torch

from quasar_kernels.reference import quasar_chunked, quasar_recurrence, relative_rms
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import (
    ADVERSARIAL_KEYS,
    assert_close,
    layer_like,
    packed,
    without_memory,
)
from tests.quasar_kernels.operator.semantics import Case, Semantics
from tests.quasar_kernels.tolerances import ADVERSARIAL, GRADIENT, OPERATOR

OPERATORS = [chunk_quasar, fused_recurrent_quasar]
operators = pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)


@operators
@pytest.mark.parametrize("T", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("dtype", OPERATOR)
def test_results_match_float64(operator, T, dtype):
    inputs = layer_like(T, B=2, dtype=dtype)
    expected, state = quasar_recurrence(*inputs)
    o, final = operator(*inputs, output_final_state=True)
    assert o.dtype == dtype
    assert final.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(o, expected, OPERATOR[dtype])
    assert relative_rms(final, state) <= OPERATOR[dtype]


@pytest.mark.parametrize(("T", "H", "S"), [(4096, 8, 64), (200_000, 1, 8)])
def test_long_sequences_match_float64(T, H, S):
    inputs = layer_like(T, H=H, S=S)
    with torch.no_grad():
        o, final = chunk_quasar(*inputs, output_final_state=True)
        expected, state = quasar_chunked(*inputs, chunk=256)
    assert_close(o, expected, OPERATOR[torch.float32])
    assert relative_rms(final, state) <= OPERATOR[torch.float32]


@operators
@pytest.mark.parametrize("keys", ADVERSARIAL_KEYS)
def test_adversarial_keys(operator, keys):
    q, k, v, beta = layer_like(300)
    k = ADVERSARIAL_KEYS[keys](k)
    o, _ = operator(q, k, v, beta)
    assert relative_rms(o, quasar_recurrence(q, k, v, beta)[0]) <= ADVERSARIAL


@pytest.mark.parametrize("chunk_size", [1, 48, 1000])
def test_the_chunk_size_changes_only_the_rounding(chunk_size):
    inputs = layer_like(300)
    o, _ = chunk_quasar_torch(*inputs, chunk_size=chunk_size)
    assert_close(o, quasar_recurrence(*inputs)[0], OPERATOR[torch.float32])


@operators
@pytest.mark.parametrize("grad", [False, True])
def test_the_result_does_not_depend_on_autocast_and_grad_mode(operator, grad):
    inputs = layer_like(150)
    with torch.no_grad():
        expected, _ = operator(*inputs)
    leaves = [x.requires_grad_(grad) for x in inputs]
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        o, _ = operator(*leaves)
    assert torch.equal(o, expected)
    assert o.requires_grad is grad


@operators
def test_scale_and_l2norm(operator):
    q, k, v, beta = layer_like(100, dtype=torch.float64)
    o, _ = operator(q, k, v, beta, scale=0.25, use_qk_l2norm_in_kernel=True)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    assert relative_rms(o, 0.25 * quasar_recurrence(q, k, v, beta)[0]) <= OPERATOR[torch.float64]


@operators
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1 << 23, 2 * 16 * 64], ids=["all at once", "64 tokens a block"])
def test_gradients_match_float64(monkeypatch, operator, cut, dtype, block):
    monkeypatch.setattr(chunk_torch_module, "BLOCK_ELEMENTS", block)
    inputs = layer_like(150, dtype=dtype)
    cu = torch.tensor([0, 50, 50, 150]) if cut else None
    initial = torch.randn(3 if cut else 1, 2, 16, 16)
    results, expected = with_float64(
        lambda *x: operator(*x, True, cu), lambda *x: quasar_recurrence(*x, cu), *inputs, initial
    )
    check(results[2:], expected[2:], GRADIENT[dtype])


@operators
@pytest.mark.parametrize("result", [0, 1])
def test_gradients_of_single_results_and_inputs(operator, result):
    q, k, v, beta = layer_like(40, dtype=torch.float64)
    results, expected = with_float64(
        lambda k: operator(q, k, v, beta, output_final_state=bool(result))[result],
        lambda k: quasar_recurrence(q, k, v, beta)[result],
        k,
    )
    check(results, expected, OPERATOR[torch.float64])


@operators
@pytest.mark.parametrize("keys", ["zeros", "half zeros", "tiny", "large"])
def test_gradients_of_adversarial_keys(operator, keys):
    q, k, v, beta = layer_like(90)
    k = ADVERSARIAL_KEYS[keys](k)
    results, expected = with_float64(
        lambda *x: operator(*x)[0], lambda *x: quasar_recurrence(*x)[0], q, k, v, beta
    )
    check(results[1:], expected[1:], ADVERSARIAL)


@operators
def test_sequences_that_do_not_fit_are_refused(operator):
    q, k, v, beta = layer_like(10, B=2)
    with pytest.raises(ValueError, match="B must be 1"):
        operator(q, k, v, beta, None, False, torch.tensor([0, 10]))
    for bounds in ([0, 9], [1, 10], [0, 6, 3, 10]):
        with pytest.raises(ValueError, match="from 0 to T = 10"):
            operator(q[:1], k[:1], v[:1], beta, None, False, torch.tensor(bounds))


@operators
def test_arguments_that_do_not_fit_are_refused(operator):
    q, k, v, beta = layer_like(10, B=2)
    state = torch.randn(2, 2, 16, 16)
    for words, call in (
        (r"k, like q, must have shape \[2, 10, 2, 16\]; got \[1, 10", (q, k[:1], v, beta)),
        ("k, like q, must have shape", (q[:, :9], k, v, beta)),
        ("v, like q, must have shape", (q, k, v[..., :8], beta)),
        (r"q must have shape \[B, T, H, S\]", (q[0], k[0], v[0], beta)),
        ("beta, one value per head, must have shape", (q, k, v, torch.rand(2, 10, 2))),
        ("one state per sequence, must have shape", (q, k, v, beta, state[:1])),
        ("one state per sequence, must have shape", (q, k, v, beta, state[:, :, :1])),
        ("q and v must have heads and channels", (q[..., :0], k[..., :0], v[..., :0], beta)),
        ("q and v must have heads", (q[:, :, :0], k[:, :, :0], v[:, :, :0], beta[:0])),
    ):
        with pytest.raises(ValueError, match=words):
            operator(*call)
    for scale in ("2", None, torch.tensor(2.0)):
        with pytest.raises(ValueError, match="scale must be a number; got"):
            operator(q, k, v, beta, scale=scale)


@operators
@pytest.mark.parametrize("place", range(3), ids=["q", "k", "v"])
def test_tensors_without_memory_are_refused(operator, place):
    for name, tensor in without_memory((2, 10, 2, 16)).items():
        inputs = [*layer_like(10, B=2)]
        inputs[place] = tensor
        with pytest.raises(ValueError, match=f"{'qkv'[place]}.* is a {name}: pa"):
            operator(*inputs)


NOT_FLOATS = {
    "int": lambda x: x.long(),
    "bool": lambda x: x > 0,
    "fp8": lambda x: x.to(torch.float8_e4m3fn),
    "complex": lambda x: x.to(torch.complex64),
    "numpy": lambda x: x.numpy(),
}


@operators
@pytest.mark.parametrize("change", NOT_FLOATS.values(), ids=NOT_FLOATS)
def test_dtypes_without_a_meaning_are_refused(operator, change):
    arguments = [*layer_like(10), torch.randn(1, 2, 16, 16)]
    for n, name in enumerate(("q", "k, like q,", "v, like q,", "beta", "initial_state")):
        wrong = [change(x) if i == n else x for i, x in enumerate(arguments)]
        with pytest.raises(ValueError, match=f"^{name}.*(bf16, fp16, fp32 or fp64|not a tensor)"):
            operator(*wrong)


@operators
def test_unknown_arguments_are_refused(operator):
    q, k, v, beta = layer_like(10)
    bounds = packed([4, 6])
    for name, value, hint in (
        ("cu_seqlen", bounds, "did you mean cu_seqlens?"),
        ("offsets", bounds, "did you mean cu_seqlens?"),
        ("output_final_states", True, "did you mean output_final_state?"),
        ("use_qk_l2norm", True, "did you mean use_qk_l2norm_in_kernel?"),
        ("scal", 2.0, "did you mean scale?"),
        ("head_first", True, "the inputs' layout is [B, T, H, ...]"),
        ("g", torch.zeros(1, 10, 2), "omit it"),
    ):
        words = f"{operator.__name__} has no argument {name} ({hint})"
        with pytest.raises(ValueError, match=re.escape(words)):
            operator(q, k, v, beta, **{name: value})
    expected, _ = operator(q, k, v, beta)
    assert torch.equal(operator(q, k, v, beta, seq_idx=None)[0], expected)


@operators
@pytest.mark.parametrize("place", range(3), ids=["q", "k", "v"])
def test_nan_does_not_reach_earlier_tokens(operator, place):
    *qkv, beta = layer_like(150)
    before, _ = operator(*qkv, beta)
    for t in (30, 64, 100):
        wrong = [x.clone() for x in qkv]
        wrong[place][:, t, 0, 0] = torch.nan
        after, _ = operator(*wrong, beta)
        assert torch.equal(after[:, :t], before[:, :t]), t
        assert torch.equal(after[:, :, 1], before[:, :, 1])  # another head
        assert not after[:, t, 0].isfinite().all()


class TestSemantics(Semantics):
    @pytest.fixture(params=OPERATORS, ids=lambda f: f.__name__)
    def case(self, request):
        packings = [[0, 1, 70, 0, 64, 130, 0]]
        return Case(request.param, layer_like, OPERATOR[torch.float32], 150, 2, packings)


@operators
def test_no_tokens(operator):
    *qkv, beta = layer_like(1, B=2)
    q, k, v = (x[:, :0] for x in qkv)
    state = torch.randn(2, 2, 16, 16)
    o, final = operator(q, k, v, beta, state, True)
    assert o.shape == (2, 0, 2, 16)
    assert torch.equal(final, state)
    packed_end = operator(q[:1], k[:1], v[:1], beta, state, True, packed([0, 0]))[1]
    assert torch.equal(packed_end, state)
    leaf = v.clone().requires_grad_()
    o, _ = operator(q, k, leaf, beta, state, True)
    o.sum().backward()
    assert leaf.grad.shape == leaf.shape


@operators
def test_no_sequences(operator):
    *qkv, beta = layer_like(70)
    q, k, v = (x[:0].requires_grad_() for x in qkv)
    o, final = operator(q, k, v, beta, None, True)
    assert o.shape == (0, 70, *q.shape[2:])
    assert final.shape == (0, q.shape[2], q.shape[3], q.shape[3])
    o.sum().backward()
    assert v.grad.shape == v.shape
