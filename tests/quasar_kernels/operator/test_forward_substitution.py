"""The inverse of unit lower triangular matrices against float64, and its gradient."""

import pytest
import torch
from fla.ops.quasar.forward_substitution import quasar_forward_substitution

from quasar_kernels.reference import relative_rms


def unit_lower(L):
    return L.double().tril(-1) + torch.eye(L.shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("C", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse(C, dtype):
    L = torch.randn(3, 2, C, C, dtype=dtype) * 0.3
    A = quasar_forward_substitution(L)
    assert A.dtype == dtype
    limit = 1e-5 if dtype == torch.float32 else 1e-12
    assert relative_rms(A, torch.linalg.inv(unit_lower(L))) <= limit
    assert torch.equal(A.diagonal(dim1=-2, dim2=-1), torch.ones(3, 2, C, dtype=dtype))
    assert torch.equal(A.triu(1), torch.zeros_like(A))


def test_equal_keys_are_accurate_though_a_neumann_series_would_overflow():
    C, alpha_kk = 64, 0.98
    L = torch.full((1, C, C), alpha_kk)
    A = quasar_forward_substitution(L)
    assert relative_rms(A, torch.linalg.inv(unit_lower(L))) <= 1e-5


def test_only_the_part_below_the_diagonal_has_a_gradient():
    L = torch.randn(2, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(quasar_forward_substitution, (L,))
    quasar_forward_substitution(L).square().sum().backward()
    assert torch.equal(L.grad.triu(), torch.zeros_like(L))
    assert L.grad.tril(-1).abs().sum() > 0


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="square"):
        quasar_forward_substitution(torch.zeros(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="L must be bf16, fp16, fp32 or fp64"):
        quasar_forward_substitution(torch.zeros(2, 4, 4).to(dtype))
