"""A and alpha of every chunk against float64 inverses of the matrices written out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_inputs import HOSTILE_KEYS, layer_like

from quasar_kernels.mount import mount
from quasar_kernels.reference import relative_rms, step_size

mount()

from fla.ops.quasar.chunk_intra_token_parallel import chunk_quasar_intra  # noqa: E402


def by_chunks(k, beta, bounds, C):
    """[(rows of A, alpha)] of every chunk of one head, in float64."""
    for first, end in bounds:
        for start in range(first, end, C):
            rows = slice(start, min(start + C, end))
            K = k[rows].double()
            alpha = step_size(K.square().sum(-1), beta.double())
            M = torch.tril(alpha[:, None] * (K @ K.T), -1)
            yield rows, torch.linalg.inv(torch.eye(len(K), dtype=torch.float64) + M), alpha


@pytest.mark.parametrize("keys", [None, "constant", "mixed norms", "half zeros"])
@pytest.mark.parametrize("cu", [None, [0, 0, 5, 70, 70, 100]])
def test_every_chunk(keys, cu):
    _, k, _, beta = layer_like(100)
    k = HOSTILE_KEYS[keys](k) if keys else k
    bounds = [(0, 100)] if cu is None else list(pairwise(cu))
    packed = None if cu is None else torch.tensor(cu)
    A, alpha = chunk_quasar_intra(k, beta, packed, chunk_size=32)
    assert A.shape == (1, 100, 2, 32)
    for h in range(2):
        for rows, wanted, step in by_chunks(k[0, :, h], beta[h], bounds, 32):
            n = len(step)
            assert relative_rms(A[0, rows, h, :n], wanted) <= 1e-5
            assert not A[0, rows, h, n:].any()
            assert relative_rms(alpha[0, rows, h], step) <= 1e-6


def test_gradcheck():
    _, k, _, beta = layer_like(11, S=3, dtype=torch.float64)
    leaves = k.requires_grad_(), beta.double().requires_grad_()
    cu = torch.tensor([0, 0, 6, 11])
    assert torch.autograd.gradcheck(lambda k, b: chunk_quasar_intra(k, b, cu, 4), leaves)
