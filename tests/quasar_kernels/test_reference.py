"""The float64 reference against the formulas, token by token."""

import math

import pytest
import torch
from torch import nn

from quasar_kernels.reference import (
    quasar_chunked,
    quasar_layer,
    quasar_recurrence,
    relative_rms,
    step_size,
)
from tests.quasar_kernels.inputs import layer_like


def by_matrices(q, k, v, beta, S):
    """Compute one head's recurrence by matrices, from `[T, S]` tensors and the state `[S, S]`."""
    outputs = []
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        lam = float(k_t @ k_t)
        alpha = (1 - math.exp(-beta * lam)) / (lam + 1e-8)
        S = (torch.eye(len(k_t)) - alpha * torch.outer(k_t, k_t)) @ S + alpha * torch.outer(
            k_t, v_t
        )
        outputs.append(S.T @ q_t)
    return torch.stack(outputs), S


@pytest.mark.parametrize("operator", [quasar_recurrence, quasar_chunked])
def test_the_operator_equals_the_formulas(operator):
    q, k, v, beta = layer_like(150, B=2, H=3, S=5, dtype=torch.float64)
    initial = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    o, final = operator(q, k, v, beta, initial)
    for b in range(2):
        for h in range(3):
            wanted, state = by_matrices(
                q[b, :, h], k[b, :, h], v[b, :, h], float(beta[h]), initial[b, h]
            )
            assert relative_rms(o[b, :, h], wanted) <= 1e-7  # beta is fp32, and exp has no expm1
            assert relative_rms(final[b, h], state) <= 1e-7


def test_chunks_agree_with_the_recurrence_for_packed_and_empty_sequences():
    q, k, v, beta = layer_like(300)
    cu = torch.tensor([0, 0, 7, 7, 200, 300, 300])
    initial = torch.randn(6, 2, 16, 16)
    o, final = quasar_recurrence(q, k, v, beta, initial, cu)
    o2, final2 = quasar_chunked(q, k, v, beta, initial, cu, chunk=32)
    assert relative_rms(o2, o) <= 1e-12
    assert relative_rms(final2, final) <= 1e-12
    assert torch.equal(final[0], initial[0].double())  # an empty sequence keeps its state
    alone, _ = quasar_recurrence(q[:, 7:200], k[:, 7:200], v[:, 7:200], beta, initial[3:4])
    assert torch.equal(o[:, 7:200], alone)


@pytest.mark.parametrize("lam", [0.0, 1e-30, 1e-8, 1e-4, 1.0, 6400.0])
def test_step_size_and_its_gradients_are_accurate(lam):
    beta = 1.7
    x = torch.tensor(lam, dtype=torch.float64, requires_grad=True)
    b = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
    alpha = step_size(x, b)
    alpha.backward()
    assert alpha.item() == pytest.approx(-math.expm1(-beta * lam) / (lam + 1e-8), rel=1e-12)
    assert b.grad.item() == pytest.approx(math.exp(-beta * lam) * lam / (lam + 1e-8), rel=1e-12)
    assert math.isfinite(x.grad.item())


def test_zero_keys_keep_the_state_and_have_finite_gradients():
    q, k, v, beta = (x.double().requires_grad_() for x in layer_like(12))
    zero = torch.zeros_like(k).requires_grad_()
    initial = torch.randn(1, 2, 16, 16, dtype=torch.float64)
    o, final = quasar_recurrence(q, zero, v, beta, initial)
    assert torch.equal(final, initial)
    o.sum().backward()
    assert torch.isfinite(zero.grad).all()


def test_the_layer_equals_torch_modules():
    torch.manual_seed(3)
    D, H, S = 12, 2, 4
    x = torch.randn(2, 9, D, dtype=torch.float64)
    names = ("q", "k", "v")
    proj = {n: nn.Linear(D, H * S, bias=False).double() for n in names}
    conv = {n: nn.Conv1d(8, 8, 4, groups=8, padding=3, bias=False).double() for n in names}
    g0, g1 = nn.Linear(D, S, bias=False).double(), nn.Linear(S, H * S).double()
    out, weight, beta_log = nn.Linear(H * S, D, bias=False).double(), torch.rand(S), torch.rand(H)
    state = {f"{n}_proj.weight": proj[n].weight for n in names}
    state |= {f"{n}_conv1d.weight": conv[n].weight for n in names}
    state |= {"g_proj.0.weight": g0.weight, "g_proj.1.weight": g1.weight, "g_proj.1.bias": g1.bias}
    state |= {"o_norm.weight": weight, "beta_log": beta_log, "o_proj.weight": out.weight}
    y = quasar_layer(state, x, num_heads=H, head_dim=S)

    q, k, v = (
        nn.functional.silu(conv[n](proj[n](x).mT)[..., :9].mT).reshape(2, 9, H, S) for n in names
    )
    o, _ = quasar_recurrence(q, k, v, nn.functional.softplus(beta_log.double()))
    norm = nn.RMSNorm(S, eps=1e-5, dtype=torch.float64)
    norm.weight.data.copy_(weight)
    assert relative_rms(y, out(norm(o).flatten(2) * torch.sigmoid(g1(g0(x))))) <= 1e-12


def test_relative_rms():
    assert relative_rms(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])) == 0
    assert relative_rms(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])) == pytest.approx(1.25)
    assert math.isnan(relative_rms(torch.tensor([math.nan]), torch.tensor([1.0])))
    assert math.isnan(relative_rms(torch.tensor([math.nan]), torch.tensor([0.0])))
    assert relative_rms(torch.tensor([0.1]), torch.tensor([0.0])) == math.inf
    with pytest.raises(ValueError, match="shapes differ"):
        relative_rms(torch.zeros(2), torch.zeros(3))
