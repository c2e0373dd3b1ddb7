"""The Triton kernels on CPU tensors; run by test_interpreter.py with TRITON_INTERPRET=1.

The interpreter multiplies the bit patterns of bf16 matrices, so kernels with a product are tested
in fp16 and fp32. It truncates bf16 results, which a GPU rounds.
"""

import contextlib
import functools
import os
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from quasar_kernels.reference import quasar_recurrence, relative_rms, step_size
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import ADVERSARIAL_KEYS, layer_like
from tests.quasar_kernels.operator.semantics import Case, Semantics
from tests.quasar_kernels.tolerances import ADVERSARIAL, OPERATOR
from tests.quasar_kernels.triton_kernels.quick_interpreter import make_quick

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.exit("Triton reads TRITON_INTERPRET when it is imported: set it to 1.", 2)

from fla.ops.quasar import gate
from fla.ops.quasar.chunk import ChunkQuasarFunction
from fla.ops.quasar.chunk_intra_token_parallel import chunk_intra, rows_packed
from fla.ops.quasar.forward_substitution import launch_forward_substitution
from fla.ops.quasar.fused_recurrent import launch_fused_recurrent
from fla.ops.quasar.layer import first_tokens, gate_and_norm
from fla.ops.quasar.layer import kernels as layer_kernels
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.operator_types import StepSizes
from fla.ops.quasar.preparation import UNCHANGED
from fla.ops.quasar.triton_kernels import passes

make_quick()
NAN = float("nan")


def launch_chunk(q, k, v, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
    """Run the segmented scan and its backward pass, which `chunk_quasar` does only on a GPU."""
    return ChunkQuasarFunction.apply(
        "triton", output_final_state, UNCHANGED, q, k, v, beta, initial_state, cu_seqlens, 1.0, None
    )


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill new tensors with NaN, so that values that no kernel writes show."""

    def empty(*shape, **kwargs):
        return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, NAN, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda x, **kw: torch.full_like(x, NAN, **kw))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.mark.parametrize("launch", [launch_chunk, launch_fused_recurrent])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("T", "B", "S"), [(1, 2, 16), (18, 1, 24), (34, 1, 64)])
def test_operator_matches_float64(launch, dtype, T, B, S):
    q, k, v, beta = layer_like(T, B, S=S, dtype=dtype)
    initial = torch.randn(B, 2, S, S)
    o, final = launch(q, k, v, beta, initial, True)
    expected, state = quasar_recurrence(q, k, v, beta, initial)
    assert relative_rms(o, expected) <= OPERATOR[dtype]
    assert relative_rms(final, state) <= OPERATOR[dtype]


class TestSemantics(Semantics):
    @pytest.fixture(params=[launch_chunk, launch_fused_recurrent])
    def case(self, request):
        # two segments, or some tokens for the recurrent kernel
        tokens, lengths = (34, [34, 0, 16]) if request.param is launch_chunk else (9, [4, 0, 2])
        packings = [[0, 1, *lengths, 0]]
        return Case(request.param, layer_like, OPERATOR[torch.float32], tokens, 2, packings)


@pytest.mark.parametrize("keys", ADVERSARIAL_KEYS)
def test_the_recurrent_kernel_with_adversarial_keys(keys):
    q, k, v, beta = layer_like(24, H=1)
    k = ADVERSARIAL_KEYS[keys](k)
    o, _ = launch_fused_recurrent(q, k, v, beta)
    assert relative_rms(o, quasar_recurrence(q, k, v, beta)[0]) <= ADVERSARIAL


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.float16, 3e-3)])
def test_a_burst_that_has_decayed_leaves_no_error(dtype, limit):
    T, window = 256, 64
    q, k, v, beta = layer_like(T, H=1, dtype=dtype)
    k, beta = torch.randn_like(k) * 0.5, torch.ones_like(beta)  # decays within tens of tokens
    v[:, 30:34] *= 30_000
    o = launch_chunk(q, k, v, beta)[0]
    expected = quasar_recurrence(q, k, v, beta)[0]
    for part, exact in zip(o.split(window, 1), expected.split(window, 1), strict=True):
        assert relative_rms(part, exact) <= limit


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_and_gradients_for_any_number_of_segments(monkeypatch, segments, dtype):
    plan = functools.partial(passes.plan_segments, segments=segments)
    monkeypatch.setattr(passes, "plan_segments", plan)
    check_gradients(layer_like(50, dtype=dtype), 1, None)


def test_gradients_of_packed_sequences():
    cu = torch.tensor([0, 0, 1, 41, 41, 57])
    check_gradients(layer_like(57), 5, cu)


@pytest.mark.parametrize("keys", ADVERSARIAL_KEYS)
def test_values_and_gradients_with_adversarial_keys(keys):
    q, k, v, beta = layer_like(40, H=1)
    check_gradients((q, ADVERSARIAL_KEYS[keys](k), v, beta), 1, None)


def check_gradients(inputs, sequences, cu):
    """Compare the chunk kernels' values and gradients, from both results, with float64."""
    dtype, (H, S) = inputs[0].dtype, inputs[0].shape[2:]
    initial = torch.randn(sequences, H, S, S)
    results, expected = with_float64(
        lambda *x: launch_chunk(*x, True, cu),
        lambda *x: quasar_recurrence(*x, cu),
        *inputs,
        initial,
    )
    check(results, expected, 1e-4 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("C", [2, 16, 64])
def test_forward_substitution(C):
    L = torch.randn(3, C, C) * 0.3
    expected = torch.linalg.inv(L.double().tril(-1) + torch.eye(C, dtype=torch.float64))
    assert relative_rms(launch_forward_substitution(L), expected) <= 1e-6


@pytest.mark.parametrize("cu", [None, [0, 0, 5, 37, 37, 50]])
@pytest.mark.parametrize("S", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_chunk_intra(cu, S, dtype):
    q, k, _, beta = layer_like(50, S=S, dtype=dtype)
    k[:, :, 1] = ADVERSARIAL_KEYS["mixed norms"](k)[:, :, 1]
    bounds = None if cu is None else torch.tensor(cu)
    plan = passes.plan_segments(q, bounds)
    stored = chunk_intra(plan, k, StepSizes.of(beta), torch.empty_like(k))
    for h in range(k.shape[2]):
        for first, end in pairwise(cu or (0, 50)):
            for t in range(first, end, 16):
                rows = slice(t, min(t + 16, end))
                expected = chunk_inverse(k[0, rows, h], beta[h])
                B = unpack(stored[0, rows, h], plan.tiles.chunk)
                assert relative_rms(B, expected) <= (1e-6 if dtype == torch.float32 else 1e-3)


def chunk_inverse(k, beta):
    """Return (I + strict_tril(a K K^T))^-1 a of one chunk and head, in float64."""
    k = k.double()
    a = step_size(k.square().sum(-1), beta.double())
    M = torch.tril(a[:, None] * (k @ k.T), -1)
    return torch.linalg.inv(torch.eye(len(k), dtype=torch.float64) + M) * a


def unpack(stored, C):
    """Return B [tokens, tokens] from one chunk's rows of `chunk_intra`'s result."""
    width = C if stored.dtype == torch.float32 else 2 * C
    n, pack = len(stored), rows_packed(C, stored.dtype, stored.shape[-1])
    rows = stored[:, : pack * width].reshape(-1, width)[:n].double()
    return rows[:, :n] + (rows[:, C : C + n] if width > C else 0)


def test_gate():
    lam = 10.0 ** torch.empty(300, 3).uniform_(-14, 3)
    lam[0] = 0
    beta, dalpha = torch.rand(3) * 5, torch.randn(300, 3)
    alpha, dlam, share = (torch.empty(300, 3) for _ in range(3))
    gate._launch(gate.quasar_gate_fwd_kernel, lam, beta, alpha, heads=3)
    gate._launch(gate.quasar_gate_bwd_kernel, lam, beta, dalpha, dlam, share, heads=3)
    wide = lam.double().requires_grad_(), beta.double().expand(300, 3).clone().requires_grad_()
    expected = step_size(*wide)
    expected.backward(dalpha.double())
    torch.testing.assert_close(alpha.double(), expected.detach(), rtol=2e-6, atol=0)
    torch.testing.assert_close(share.double(), wide[1].grad, rtol=1e-4, atol=1e-12)
    torch.testing.assert_close(dlam.double(), wide[0].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("R", [1, 70])
@pytest.mark.parametrize("kind", ["one", "equal", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(R, kind, dtype):
    length = R // 2 if R % 2 == 0 else R  # of equal sequences, two of them or one
    position = {"one": None, "equal": length, "packed": (torch.arange(R) % 7).int()}[kind]
    x = torch.randn(R, 48, dtype=dtype)[:, :40]
    taps, bias = torch.randn(40, 4), torch.randn(40) if kind == "packed" else None
    y = layer_kernels.launch_conv_silu(x, taps, bias, position)
    expected = layer_kernels.conv_silu_torch(x.double(), taps, bias, position)
    assert relative_rms(y, expected) <= (1e-6 if dtype == torch.float32 else 4e-3)


def projection_weights(dtype):
    """Return a layer's weights in `dtype`, of which only those of the projection are set."""
    qkv = [torch.randn(128, 64).to(dtype) / 8 for _ in range(3)]
    taps = [torch.rand(128, 1, 4).to(dtype) - 0.5 for _ in range(3)]
    return Weights(*qkv, *[None] * 3, *taps, *[None] * 6)


def exact_projection(x, weights):
    """Return q, k and v of a sequence in float64, with fp16 operands."""
    products = x.half().double() @ torch.cat(weights[:3]).half().double().T
    taps = torch.cat(weights.taps()).double()
    return F.silu(F.conv1d(F.pad(products.T, (3, 0)), taps, groups=384)).T


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("bounds", [None, [0, 0, 3, 4, 6, 20, 20]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_first_tokens(monkeypatch, block, bounds, dtype):
    """Each sequence's first three tokens, and no others, are overwritten."""
    monkeypatch.setattr(first_tokens, "FEW", block)
    weights = projection_weights(dtype)
    x, qkv = torch.randn(20, 64), torch.full((20, 384), NAN, dtype=torch.float16)
    ends = bounds or range(0, 21, 5)
    tensor = None
    if bounds is not None:
        tensor = torch.tensor(bounds, dtype=torch.int32).repeat_interleave(2)[::2]  # strided
    first_tokens.replace_first_tokens(x, weights, tensor, len(ends) - 1, qkv)
    written = torch.zeros(20, dtype=torch.bool)
    for begin, end in pairwise(ends):
        tokens = slice(begin, min(begin + 3, end))
        written[tokens] = True
        if end > begin:
            assert relative_rms(qkv[tokens], exact_projection(x[tokens], weights)) <= 1e-3
    assert torch.equal(qkv.isnan().all(1), ~written)


@pytest.mark.parametrize(("halo", "tokens"), [(1, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_halo_tokens(monkeypatch, halo, tokens, by_kernel):
    monkeypatch.setattr(first_tokens, "_is_for_kernel", lambda *_: by_kernel)
    weights = projection_weights(torch.float32)
    call = Call(2, 64, 1e-5, torch.float16, None, "auto")
    rows, qkv = torch.randn(halo + tokens, 64), torch.full((1, 5, 384), NAN, dtype=torch.float16)
    parts = [x.unflatten(2, (2, 64)) for x in qkv.split(128, 2)]
    first_tokens.replace_halo_tokens(call, rows, weights, halo, parts)
    assert relative_rms(qkv[0, :tokens], exact_projection(rows, weights)[halo:]) <= 1e-3
    assert qkv[0, tokens:].isnan().all()


@pytest.mark.parametrize("S", [16, 24, 64])
def test_gated_norm(S):
    x, gated, weight = torch.randn(70, S), torch.randn(70, S), torch.rand(S)
    y = layer_kernels.launch_gated_rmsnorm(x, gated, weight, 1e-5)
    expected = layer_kernels.gated_rmsnorm_torch(x.double(), gated.double(), weight, 1e-5)
    assert relative_rms(y, expected) <= 1e-6


@pytest.mark.parametrize(("R", "H", "S"), [(1, 2, 16), (70, 2, 16), (33, 3, 24), (65, 1, 64)])
def test_gate_and_norm(R, H, S):
    o, wide = torch.randn(R, H, S).half(), torch.randn(R, 3 * S).half()
    weight, bias, norm = torch.randn(H * S, S).half(), torch.randn(H * S).half(), torch.rand(S)
    y = gate_and_norm.gate_and_norm(o, wide[:, S : 2 * S], weight, bias, norm, 1e-5)
    gate = wide[:, S : 2 * S].double() @ weight.double().T + bias.double()
    expected = layer_kernels.gated_rmsnorm_torch(o.double(), gate.view(R, H, S), norm, 1e-5)
    assert relative_rms(y, expected) <= 5e-4
