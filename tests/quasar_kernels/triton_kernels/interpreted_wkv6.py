"""WKV6's Triton kernels on CPU tensors against float64; run by test_interpreter.py.

It needs TRITON_INTERPRET=1, as interpreted_kernels.py does, and shares its poisoned memory.
"""

from __future__ import annotations

import pytest
import torch

from quasar_kernels.blocks.wkv6_triton.launch import wkv6_triton
from quasar_kernels.decay_reference import wkv6_recurrence
from tests.quasar_kernels.blocks.calls import check, results_and_gradients, wkv6_inputs
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR
from tests.quasar_kernels.triton_kernels.interpreted_kernels import poisoned  # noqa: F401

FP32, FP16 = torch.float32, torch.float16
LIMITS = {FP32: GRADIENT[FP32], FP16: 1.5e-3}


def check_gradients(x, bounds=None, segments=None):
    """Compare results and all gradients, of r, k, v, w, u and the state, with float64."""
    found = results_and_gradients(lambda *x: wkv6_triton(*x, bounds, segments=segments), x)
    wanted = results_and_gradients(lambda *x: wkv6_recurrence(*x, bounds), x, torch.float64)
    check(found, wanted, LIMITS[x[0].dtype])


@pytest.mark.parametrize(
    ("T", "B", "H", "segments", "K", "V", "dtype"),
    [
        (1, 2, 1, None, 16, 24, FP32),
        (70, 2, 2, 1, 32, 32, FP16),
        (34, 1, 1, 2, 24, 40, FP32),
    ],
)
def test_results_and_gradients(T, B, H, segments, K, V, dtype):
    x = [*wkv6_inputs(T, B, H, K, V, dtype=dtype), torch.randn(B, H, K, V)]
    check_gradients(x, segments=segments)


def test_packed_sequences():
    lengths = [0, 1, 40, 0, 20, 0]
    x = [*wkv6_inputs(sum(lengths), H=1, V=16), torch.randn(len(lengths), 1, 16, 16)]
    check_gradients(x, packed(lengths), segments=2)


@pytest.mark.parametrize("decay", [0.0, 3.5, 1e6])
def test_any_decay_with_its_gradients(decay):
    x = wkv6_inputs(40, H=1, V=16, decay=decay)
    found = results_and_gradients(lambda *x: wkv6_triton(*x, segments=2), x)
    wanted = results_and_gradients(wkv6_recurrence, x, torch.float64)
    check(found[:5], wanted[:5], OPERATOR[FP32])
    assert all(torch.isfinite(y).all() for y in found)
    if decay < 10:
        check(found[5:], wanted[5:], OPERATOR[FP32])


def test_one_strong_decay_costs_its_neighbours_no_digits():
    r, k, v, w, u = wkv6_inputs(128, H=1, decay=0.01)
    w[:, 5::20] = -1e6
    w[:, 50] = float("-inf")
    found, wanted = wkv6_triton(r, k, v, w, u), wkv6_recurrence(r, k, v, w, u)
    check(found, wanted, OPERATOR[FP32])


def test_single_tokens_are_one_walk():
    x = wkv6_inputs(3, B=2)
    state, found = None, []
    for t in range(3):
        o, state = wkv6_triton(*(y[:, t : t + 1] for y in x[:4]), x[4], state)
        found.append(o)
    check((torch.cat(found, 1), state), wkv6_recurrence(*x), OPERATOR[FP32])


def test_without_gradients_nothing_is_kept():
    x = wkv6_inputs(40, H=1)
    o, final = wkv6_triton(*x)
    assert not o.requires_grad
    check((o, final), wkv6_recurrence(*x), OPERATOR[FP32])
