"""The step size and its derivatives: accurate also for small |k|^2."""

import mpmath
import pytest
import torch
from fla.ops.quasar.gate import fused_quasar_gate

H = 5
LAMBDAS = torch.cat([torch.zeros(1), 10.0 ** torch.linspace(-14, 4, 179)])


def values(shape):
    lam = LAMBDAS.repeat_interleave(H).view(shape)
    return lam.requires_grad_(), (torch.rand(H) * 5 + 0.05).requires_grad_()


def exact(lam, beta):
    """Return alpha, its derivatives by lambda and beta, and the magnitude of the former's terms."""
    lam, beta, eps = mpmath.mpf(lam), mpmath.mpf(beta), mpmath.mpf("1e-8")
    decay = mpmath.exp(-beta * lam)
    alpha = (1 - decay) / (lam + eps)
    slope = (beta * decay - alpha) / (lam + eps)
    return alpha, slope, decay * lam / (lam + eps), abs(slope) + beta**2 * decay


@pytest.mark.parametrize("shape", [(2, 90, H), (2, 90, H, 1)])
def test_values_and_gradients_are_accurate(shape):
    lam, beta = values(shape)
    alpha = fused_quasar_gate(lam, beta)
    assert alpha.dtype == torch.float32
    assert alpha.shape == shape
    alpha.sum().backward()
    pairs = zip(lam.flatten().tolist(), beta.tolist() * 180, strict=True)
    with mpmath.workdps(60):
        table = torch.tensor([[float(x) for x in exact(*pair)] for pair in pairs]).double()
    expected, slope, share, size = table.unbind(1)
    torch.testing.assert_close(alpha.flatten().double(), expected, rtol=1e-6, atol=0)
    assert ((lam.grad.flatten() - slope).abs() <= 1e-5 * size).all()
    torch.testing.assert_close(beta.grad.double(), share.view(-1, H).sum(0), rtol=1e-5, atol=0)


def test_gradcheck():
    lam = torch.tensor([[0.003, 0.09], [0.11, 2.0], [0.5, 30.0]], dtype=torch.float64)
    beta = torch.tensor([0.7, 1.9], dtype=torch.float64)
    leaves = lam.requires_grad_(), beta.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, b: fused_quasar_gate(x, b, torch.float64), leaves)


def test_the_output_dtype_rounds_only_the_result():
    lam, beta = values((180, H))
    alpha = fused_quasar_gate(lam.detach(), beta, torch.bfloat16)
    assert torch.equal(alpha, fused_quasar_gate(lam.detach(), beta).bfloat16())


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\[\.\.\., 5\]"):
        fused_quasar_gate(torch.rand(2, 3, 4), torch.rand(5))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    lam, beta = torch.ones(3, H), torch.ones(H)
    with pytest.raises(ValueError, match="lambda_t must be bf16, fp16, fp32 or fp64"):
        fused_quasar_gate(lam.to(dtype), beta)
    with pytest.raises(ValueError, match="beta must be bf16, fp16, fp32 or fp64"):
        fused_quasar_gate(lam, beta.to(dtype))
