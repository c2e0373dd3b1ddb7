"""WKV6 and SSD on a CPU against their definitions in float64."""

from functools import partial

import pytest
import torch

from tests.quasar_kernels.blocks.calls import SSD, WKV6, check_fp16_range
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR

LIMIT = OPERATOR[torch.float32]
operators = pytest.mark.parametrize("operator", [WKV6, SSD], ids=["wkv6", "ssd"])


@operators
@pytest.mark.parametrize("T", [0, 1, 3, 64, 130])
def test_results_match_float64(operator, T):
    x, state = operator.inputs(T, B=2), torch.randn(2, *operator.state)
    check(operator.call(*x, state), operator.exact(*x, state), LIMIT)


@operators
@pytest.mark.parametrize("dtype", OPERATOR)
def test_every_dtype(operator, dtype):
    x = operator.inputs(100, dtype=dtype)
    o, final = operator.call(*x)
    assert o.dtype == dtype
    assert final.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # SSD's step sizes and skip factors are fp32
    check((o, final), operator.exact(*x), max(OPERATOR[dtype], 1e-7))


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
