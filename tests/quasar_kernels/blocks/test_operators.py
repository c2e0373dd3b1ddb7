"""WKV6 and SSD on a CPU against their definitions in float64."""

import sys
import types
from functools import partial

import pytest
import torch
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

from quasar_kernels.blocks.ssd import OPERATOR as SSD_OPERATOR
from quasar_kernels.blocks.ssd import ssd
from quasar_kernels.blocks.wkv6 import wkv6
from quasar_kernels.decay_reference import ssd_recurrence, wkv6_recurrence
from tests.quasar_kernels.blocks.calls import SSD, WKV6, check_fp16_range, ssd_inputs, wkv6_inputs
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR

LIMIT = OPERATOR[torch.float32]
operators = pytest.mark.parametrize("operator", [WKV6, SSD], ids=["wkv6", "ssd"])


@operators
@pytest.mark.parametrize("T", [0, 1, 3, 64, 130])
@pytest.mark.parametrize("dtype", OPERATOR)
def test_results_match_float64(operator, T, dtype):
    x, state = operator.inputs(T, B=2, dtype=dtype), torch.randn(2, *operator.state)
    o, final = operator.call(*x, state)
    assert o.dtype == dtype
    assert final.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # SSD's step sizes and skip factors are fp32
    check((o, final), operator.exact(*x, state), max(OPERATOR[dtype], 1e-7))


@operators
def test_packed_sequences_equal_separate_ones(operator):
    lengths = [0, 1, 70, 0, 64, 65, 0]
    x, state = operator.inputs(sum(lengths)), torch.randn(len(lengths), *operator.state)
    bounds = packed(lengths)
    check(operator.call(*x, state, bounds), operator.exact(*x, state, bounds), LIMIT)


@operators
def test_gradients_match_float64(operator):
    x, bounds = [*operator.inputs(90), torch.randn(3, *operator.state)], packed([30, 0, 60])
    found, wanted = with_float64(
        lambda *x: operator.call(*x, bounds), lambda *x: operator.exact(*x, bounds), *x
    )
    check(found, wanted, GRADIENT[torch.float32])


@operators
@pytest.mark.parametrize("decay", [0.0, 1e-4, 30.0, 1000.0, 1e6])
def test_any_decay_with_its_gradients(operator, decay):
    found, wanted = with_float64(operator.call, operator.exact, *operator.inputs(150, decay=decay))
    check(found[: operator.steady], wanted[: operator.steady], LIMIT)
    assert all(torch.isfinite(y).all() for y in found)


@operators
def test_results_beyond_fp16_are_infinite_and_no_others(operator):
    check_fp16_range(operator._replace(inputs=partial(operator.inputs, dtype=torch.float16)), 100)


def test_the_definition_equals_fla_s():
    x = wkv6_inputs(9, B=2)
    state = torch.randn(2, 2, 16, 24)
    r, k, v, w, u = x
    turned = (y.transpose(1, 2) for y in (r, k, v, w))
    o, final = naive_recurrent_rwkv6(*turned, u, 1.0, state, True)
    check((o.transpose(1, 2), final), wkv6_recurrence(*x, state), 1e-6)


def test_strong_decays_do_not_reduce_the_precision_of_neighbours():
    r, k, v, w, u = wkv6_inputs(128, decay=0.01)
    w[:, 5::20] = -1e6
    check(wkv6(r, k, v, w, u), wkv6_recurrence(r, k, v, w, u), LIMIT)
    w[:, 50] = float("-inf")
    o, _ = wkv6(r, k, v, w, u)
    alone, _ = wkv6(*(y[:, 50:] for y in (r, k, v, w)), u)
    assert torch.isfinite(o).all()
    check([o[:, 51:]], [alone[:, 1:]], LIMIT)


def test_invalid_arguments_of_wkv6():
    r, k, v, w, u = wkv6_inputs(10, B=2)
    for arguments, words in (
        ((r[0], k, v, w, u), r"r must have shape \[B, T, H, K\]"),
        ((r, k[:, 1:], v, w, u), "k must have shape"),
        ((r, k, v[:, 1:], w, u), "v must have shape"),
        ((r, k, v, w[..., :1], u), "w must have shape"),
        ((r, k, v, w, u[:1]), "u must have shape"),
        ((r, k, v, w, u, torch.zeros(1, 2, 16, 24)), "one state per sequence"),
        ((r, k, v, w, u, None, packed([10])), "B must be 1"),
        ((r[:1], k[:1], v[:1], w[:1], u, None, packed([9])), "must rise from 0 to T = 10"),
    ):
        with pytest.raises(ValueError, match=words):
            wkv6(*arguments)


@pytest.mark.parametrize("N", [16, 128])
def test_state_sizes_without_a_skip(N):
    x = ssd_inputs(70, N=N)[:5]
    check(ssd(*x), ssd_recurrence(*x), LIMIT)


def test_invalid_arguments_of_ssd():
    x, dt, A, B, C, D = ssd_inputs(10, B=2)
    for arguments, words in (
        ((x[0], dt, A, B, C), r"x must have shape \[batch, T, H, P\]"),
        ((x[:, :, :3], dt, A, B, C), "got 3 and 2"),
        ((x, dt[..., 1:], A, B, C), "dt must have shape"),
        ((x, dt, A[1:], B, C), "A must have shape"),
        ((x, dt, A, B, C[..., 1:]), "C must have shape"),
        ((x, dt, A, B[:, 1:], C[:, 1:]), "B must have shape"),
        ((x, dt, A, B, C, D[1:]), "D must have shape"),
        ((x, dt, A, B, C, D, torch.zeros(1, *SSD.state)), "one state per sequence"),
        ((x, dt, A, B, C, D, None, packed([10])), "B must be 1"),
    ):
        with pytest.raises(ValueError, match=words):
            ssd(*arguments)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, *, D, initial_states, return_final_states
):
    """A fake with these parameters of mamba_ssm's function, whose states are `[batch, H, P, N]`."""
    assert return_final_states
    y, final = ssd_recurrence(x, dt, A, B, C, D, initial_states.mT, dtype=torch.float32)
    return y, final.mT


def test_the_call_of_mamba_ssm_s_kernels(monkeypatch):
    """The package needs a GPU, so a fake with its signature replaces it."""
    module = types.ModuleType("ssd_combined")
    module.mamba_chunk_scan_combined = mamba_chunk_scan_combined
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", module)
    x, state = ssd_inputs(20, B=2), torch.randn(2, *SSD.state)
    check(SSD_OPERATOR.named("mamba_ssm").call(*x, state, None), ssd_recurrence(*x, state), LIMIT)
