"""Kimi Delta Attention's kernels on a GPU, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from quasar_kernels.delta_reference import delta_chunked
from tests.gpu.calls import ON_CUDA_KERNELS
from tests.quasar_kernels.delta_rule.calls import chunk_kda, inputs, recurrent_kda, wide
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import common_key, packed
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR

pytestmark = ON_CUDA_KERNELS

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda x: str(x)[6:]
)
LIMITS = {torch.bfloat16: GRADIENT[torch.bfloat16], torch.float16: 3e-3, torch.float32: 2e-6}


def drawn(T, **options):
    """Draw inputs on the GPU, with decays per channel."""
    return inputs(T, device="cuda", channels=True, **options)


def mixed(x):
    """Replace the decays by -110, -1e-3 and others next to each other, in tokens and channels."""
    kinds = torch.tensor([-110.0, -1e-3, 0.0, -1.0, -30.0], device="cuda")
    return x._replace(g=kinds[torch.randint(5, x.g.shape, device="cuda")])


def compare(x, state, bounds=None):
    """Compare o, the final state and all gradients with float64."""
    K = x.q.shape[-1]

    def run(*leaves):
        options = {"initial_state": leaves[5], "output_final_state": True, "cu_seqlens": bounds}
        return chunk_kda(type(x)(*leaves[:5]), **options)

    def exact(*leaves):
        y = wide(type(x)(*leaves[:5]))
        return delta_chunked(*y, leaves[5], bounds, scale=K**-0.5, chunk=16)

    check(*with_float64(run, exact, *x, state), LIMITS[x.q.dtype])


@DTYPES
@pytest.mark.parametrize(
    ("T", "shape"),
    [(1, {}), (63, {}), (65, {"B": 2}), (1000, {}), (300, {"group": 2}), (200, {"V": 64}),
     (200, {"K": 64, "V": 128}), (200, {"K": 24})],
    ids=str,
)  # fmt: skip
def test_results_and_gradients(dtype, T, shape):
    x = drawn(T, dtype=dtype, **{"K": 128} | shape)
    K, (_, HV, V) = x.q.shape[-1], x.v.shape[1:]
    compare(x, torch.randn(x.q.shape[0], HV, K, V, device="cuda"))


@DTYPES
def test_packed_sequences_with_strong_decays(dtype):
    bounds = packed([0, 1, 300, 0, 64, 17, 0], "cuda")
    compare(
        mixed(drawn(382, K=128, dtype=dtype)), torch.randn(7, 2, 128, 128, device="cuda"), bounds
    )


def test_long_sequences_in_segments_with_similar_keys():
    x = drawn(4000, K=128, dtype=torch.bfloat16)
    k = torch.nn.functional.normalize(common_key(x.k, 0.3), dim=-1)
    compare(x._replace(k=k), torch.randn(1, 2, 128, 128, device="cuda"))


@DTYPES
def test_the_past_does_not_depend_on_the_future_and_repeats_are_equal(dtype):
    x = drawn(500, K=128, dtype=dtype)
    o, _ = chunk_kda(x)
    assert torch.equal(chunk_kda(x)[0], o)
    for t in (1, 16, 63, 64, 200):
        later = [torch.cat([y[:, :t], y[:, t:].flip(1)], 1) for y in x]
        assert torch.equal(chunk_kda(type(x)(*later))[0][:, :t], o[:, :t]), t


@pytest.mark.parametrize("group", [1, 2])
def test_decoding(group):
    x = drawn(20, B=3, K=128, group=group, dtype=torch.bfloat16)
    state = torch.randn(3, 2 * group, 128, 128, device="cuda")
    wanted = delta_chunked(*wide(x), state, scale=128**-0.5, chunk=4)
    found = recurrent_kda(x, initial_state=state, output_final_state=True)
    check(found, wanted, OPERATOR[torch.bfloat16])
