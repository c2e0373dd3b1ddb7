"""The Triton kernels of WKV6 and SSD on CPU tensors against float64; run by test_interpreter.py.

Needs TRITON_INTERPRET=1. The fixture `poisoned` of interpreted_kernels.py applies here, too.
"""

from functools import partial

import pytest
import torch

from quasar_kernels.blocks.ssd_triton.launch import ssd_triton
from quasar_kernels.blocks.wkv6_triton.launch import wkv6_triton
from quasar_kernels.decay_reference import ssd_recurrence, wkv6_recurrence
from tests.quasar_kernels.blocks.calls import SSD, WKV6, check_fp16_range, ssd_inputs, wkv6_inputs
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR
from tests.quasar_kernels.triton_kernels.interpreted_kernels import poisoned  # noqa: F401

FP32, FP16 = torch.float32, torch.float16
LIMITS = {FP32: GRADIENT[FP32], FP16: 1.5e-3}
# few columns of values, because a program scans each column of the states
OPERATORS = [
    WKV6._replace(call=wkv6_triton, inputs=partial(wkv6_inputs, V=8), state=(2, 16, 8)),
    SSD._replace(call=ssd_triton, inputs=partial(ssd_inputs, P=4), state=(4, 16, 4)),
]
kernels = pytest.mark.parametrize("operator", OPERATORS, ids=["wkv6", "ssd"])


def with_definition(operator, x, bounds=None, segments=None):
    """Return the results and the gradients of inputs and state, of the kernels and of float64."""
    return with_float64(
        lambda *x: operator.call(*x, bounds, segments=segments),
        lambda *x: operator.exact(*x, bounds),
        *x,
    )


@kernels
@pytest.mark.parametrize(
    ("T", "B", "H", "segments", "K", "V", "dtype"),
    [(1, 2, 1, None, 16, 24, FP32), (34, 1, 4, 1, 32, 32, FP16), (34, 1, 1, 3, 24, 33, FP32)],
)
def test_results_and_gradients(operator, T, B, H, segments, K, V, dtype):
    # SSD's state has N = K values for each of the P = V channels of a head
    wkv6_sizes, ssd_sizes = {"K": K, "V": V}, {"N": K, "P": V, "G": max(1, H // 2)}
    sizes = wkv6_sizes if operator.call is wkv6_triton else ssd_sizes
    x = [*operator.inputs(T, B, H=H, **sizes, dtype=dtype), torch.randn(B, H, K, V)]
    check(*with_definition(operator, x, segments=segments), LIMITS[dtype])


@kernels
def test_results_beyond_fp16_are_infinite_and_no_others(operator):
    check_fp16_range(operator._replace(inputs=partial(operator.inputs, dtype=FP16)), 34)


@kernels
def test_bounds_that_do_not_fit_are_refused(operator):
    for bounds in ([0, 5], [0, 12], [0, 7, 5, 10]):
        with pytest.raises(ValueError, match="from 0 to T = 10"):
            operator.call(*operator.inputs(10), None, torch.tensor(bounds))


@kernels
def test_packed_sequences(operator):
    lengths = [0, 1, 34, 5]
    x = [*operator.inputs(sum(lengths)), torch.randn(len(lengths), *operator.state)]
    check(*with_definition(operator, x, packed(lengths), segments=2), LIMITS[FP32])


@kernels
@pytest.mark.parametrize("decay", [0.0, 3.5, 1e6])
def test_any_decay_with_its_gradients(operator, decay):
    x = [*operator.inputs(34, decay=decay), torch.zeros(1, *operator.state)]
    found, wanted = with_definition(operator, x, segments=2)
    assert all(torch.isfinite(y).all() for y in found)
    sure = None if decay < 10 else operator.steady
    check(found[:sure], wanted[:sure], OPERATOR[FP32])


def test_strong_decays_leave_the_digits_of_later_weak_ones():
    x = ssd_inputs(64, H=1, G=1)
    is_late = torch.arange(64) % 16 >= 12  # weak after strong ones in each chunk
    x[1][:, ~is_late] = 100 / x[2].abs().max()
    found, wanted = with_float64(ssd_triton, ssd_recurrence, *x)
    late = [
        (y[:, is_late], w[:, is_late])
        for y, w in zip(found, wanted, strict=True)
        if y.ndim > 2 and y.shape[1] == 64
    ]
    assert len(late) == 5
    check(*zip(*late, strict=True), 4e-6)


def test_strong_decays_do_not_reduce_the_precision_of_neighbours():
    r, k, v, w, u = wkv6_inputs(64, H=1, decay=0.01)
    w[:, 5::20] = -1e6
    w[:, 50] = float("-inf")
    found, wanted = wkv6_triton(r, k, v, w, u), wkv6_recurrence(r, k, v, w, u)
    check(found, wanted, OPERATOR[FP32])


def test_columns_of_one_projection():
    x, dt, A, B, C, D = ssd_inputs(18, 2, H=2, P=16, G=1)
    mixed = torch.cat([x.flatten(2), B.flatten(2), C.flatten(2)], -1)
    columns = mixed.split([32, 16, 16], -1)
    parts = [y.unflatten(-1, (-1, 16)) for y in columns]
    check(ssd_triton(parts[0], dt, A, *parts[1:], D), ssd_recurrence(x, dt, A, B, C, D), 1e-4)


@kernels
def test_single_tokens_equal_one_call(operator):
    # all columns, whose number is no power of two
    x, state, found = operator.inputs.func(3, B=2), None, []
    for t in range(3):
        token = (y[:, t : t + 1] if y.ndim > 2 else y for y in x)
        o, state = operator.call(*token, state)
        found.append(o)
    check((torch.cat(found, 1), state), operator.exact(*x), OPERATOR[FP32])


@kernels
def test_calls_without_gradients(operator):
    x = operator.inputs(18)[:5]  # SSD without a skip
    o, final = operator.call(*x)
    assert not o.requires_grad
    check((o, final), operator.exact(*x), OPERATOR[FP32])
