"""The operator on a GPU against float64, in Triton and in CUDA C++: accuracy and semantics."""

from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar import chunk_quasar
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.operator_types import ScanInputs

from quasar_kernels.reference import quasar_chunked, quasar_recurrence, relative_rms
from tests.gpu.calls import CAPABILITY, CHANNELS, inputs_of
from tests.quasar_kernels.inputs import ADVERSARIAL_KEYS, assert_close, common_key
from tests.quasar_kernels.operator.semantics import Case, Semantics
from tests.quasar_kernels.tolerances import OPERATOR

pytestmark = pytest.mark.gpu

LIMIT = OPERATOR[torch.bfloat16]


def in_cuda(q, k, v, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
    inputs = ScanInputs.of(q, k, v, beta, initial_state, cu_seqlens)
    return cuda_scan.forward(inputs, output_final_state)[:2]


@pytest.fixture(params=["triton 64", "cuda 64", "cuda 128"])
def path(request, monkeypatch):
    """An implementation and head width: its operator, and layer-like inputs for it."""
    name, width = request.param.split()
    if name == "cuda" and CAPABILITY < (8, 0):
        pytest.skip("needs compute capability 8.0")
    monkeypatch.setenv("QUASAR_BACKEND", name)
    return SimpleNamespace(
        name=name,
        operator=chunk_quasar if name == "triton" else in_cuda,
        inputs=lambda T, B=1: inputs_of(T, int(width), B=B),
    )


@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 127, 512, 1000, 4096, 65_537, 1_000_000])
def test_output_matches_float64(path, T):
    inputs = path.inputs(T)
    oracle = quasar_recurrence if T <= 512 else quasar_chunked
    expected, state = oracle(*inputs)
    o, final = path.operator(*inputs, None, True)
    assert_close(o, expected, LIMIT)
    assert relative_rms(final, state) <= LIMIT


class TestSemantics(Semantics):
    @pytest.fixture
    def case(self, path):
        packings = [[0, 1, 700, 0, 64, 9000, 65, 0], [5], [16] * 50]
        return Case(path.operator, path.inputs, LIMIT, 4001, 1, packings, 70_000)


@pytest.mark.parametrize("T", [1000, 4001, 20_000, 200_000, 1_000_000])
@pytest.mark.parametrize("noise", [0.1, 0.01])
def test_correlated_keys(path, noise, T):
    q, k, v, beta = path.inputs(T)
    k = common_key(k, noise)
    o, _ = path.operator(q, k, v, beta)
    assert_close(o, quasar_chunked(q, k, v, beta)[0], {"triton": 9e-3, "cuda": 7e-3}[path.name])


@pytest.mark.parametrize(
    ("keys", "triton", "cuda"),
    [
        # CUDA: measured up to 3.1e-3 over lengths, widths and dtypes
        ("constant", 9e-3, LIMIT),
        # CUDA: measured up to 9.1e-3, because adjacent updates cancel in the state
        ("alternating", 9e-3, 1.4e-2),
        ("one key, 0.01 noise", 9e-3, 7e-3),
        ("mixed norms", 9e-3, 9e-3),
        ("half zeros", LIMIT, LIMIT),
        ("zeros", 0.0, 0.0),
        ("large", 9e-3, 9e-3),
        ("tiny", LIMIT, LIMIT),
    ],
)
def test_adversarial_keys(path, keys, triton, cuda):
    q, k, v, beta = path.inputs(3000)
    k = ADVERSARIAL_KEYS[keys](k)
    o, _ = path.operator(q, k, v, beta)
    assert torch.isfinite(o).all()
    limit = cuda if path.name == "cuda" else triton
    assert relative_rms(o, quasar_chunked(q, k, v, beta)[0]) <= limit


def test_more_than_2_31_elements(path):
    beta = torch.ones_like(path.inputs(1)[3])
    T = (1 << 31) // CHANNELS + 5000
    q, k, v = (
        torch.randn(1, T, len(beta), CHANNELS // len(beta), device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    for x in (q, k, v):
        x.mul_(0.3)
    o, _ = path.operator(q, k, v, beta)
    # the state forgets distant tokens, so the end can be compared with a call on the last 12,000
    tail = slice(T - 12_000, T)
    expected, _ = quasar_chunked(q[:, tail], k[:, tail], v[:, tail], beta)
    assert relative_rms(o[:, -2000:], expected[:, -2000:]) <= LIMIT
