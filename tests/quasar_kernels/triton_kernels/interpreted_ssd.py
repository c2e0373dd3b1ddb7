"""SSD's Triton kernels on CPU tensors against float64; run by test_interpreter.py.

It needs TRITON_INTERPRET=1, as interpreted_kernels.py does, and shares its poisoned memory.
"""

from __future__ import annotations

import pytest
import torch

from quasar_kernels.blocks.ssd_triton.launch import ssd_triton
from quasar_kernels.decay_reference import ssd_recurrence
from tests.quasar_kernels.blocks.calls import check, results_and_gradients, ssd_inputs
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR
from tests.quasar_kernels.triton_kernels.interpreted_kernels import poisoned  # noqa: F401

FP32, FP16 = torch.float32, torch.float16
LIMITS = {FP32: GRADIENT[FP32], FP16: 1.5e-3}


def check_gradients(x, bounds=None, segments=None):
    """Compare results and all gradients, of x, dt, A, B, C, D and the state, with float64."""
    found = results_and_gradients(lambda *x: ssd_triton(*x, bounds, segments=segments), x)
    wanted = results_and_gradients(lambda *x: ssd_recurrence(*x, bounds), x, torch.float64)
    check(found, wanted, LIMITS[x[0].dtype])


@pytest.mark.parametrize(
    ("T", "B", "H", "G", "segments", "N", "P", "dtype"),
    [
        (1, 2, 1, 1, None, 16, 24, FP32),
        (70, 2, 2, 1, 1, 16, 32, FP16),
        (34, 1, 1, 1, 2, 24, 40, FP32),
    ],
)
def test_results_and_gradients(T, B, H, G, segments, N, P, dtype):
    x = [*ssd_inputs(T, B, H, P, G, N, dtype=dtype), torch.randn(B, H, N, P)]
    check_gradients(x, segments=segments)


def test_packed_sequences():
    lengths = [0, 1, 40, 0, 20, 0]
    x = [*ssd_inputs(sum(lengths), H=1, P=16, G=1), torch.randn(len(lengths), 1, 16, 16)]
    check_gradients(x, packed(lengths), segments=2)


@pytest.mark.parametrize("rate", [0.0, 3.5, 1e6])
def test_any_decay_with_its_gradients(rate):
    x = ssd_inputs(70, H=1, P=16, G=1, rate=rate)
    found = results_and_gradients(lambda *x: ssd_triton(*x, segments=2), x)
    wanted = results_and_gradients(ssd_recurrence, x, torch.float64)
    check(found[:2], wanted[:2], OPERATOR[FP32])
    assert all(torch.isfinite(y).all() for y in found)
    if rate < 10:
        check(found[2:], wanted[2:], OPERATOR[FP32])


def test_columns_of_one_projection_are_read_where_they_lie():
    x, dt, A, B, C, D = ssd_inputs(40, 2, H=2, P=16, G=1)
    mixed = torch.cat([x.flatten(2), B.flatten(2), C.flatten(2)], -1)
    columns = mixed.split([32, 16, 16], -1)
    parts = [y.unflatten(-1, (-1, 16)) for y in columns]
    check(ssd_triton(parts[0], dt, A, *parts[1:], D), ssd_recurrence(x, dt, A, B, C, D), 1e-4)


def test_single_tokens_are_one_walk():
    x, dt, A, B, C, D = ssd_inputs(3, 2)
    state, found = None, []
    for t in range(3):
        y, state = ssd_triton(
            *(z[:, t : t + 1] for z in (x, dt)), A, B[:, t : t + 1], C[:, t : t + 1], D, state
        )
        found.append(y)
    check((torch.cat(found, 1), state), ssd_recurrence(x, dt, A, B, C, D), OPERATOR[FP32])


def test_without_a_skip_and_without_gradients_nothing_is_kept():
    x = ssd_inputs(40, H=2)[:5]
    y, final = ssd_triton(*x)
    assert not y.requires_grad
    check((y, final), ssd_recurrence(*x), OPERATOR[FP32])
