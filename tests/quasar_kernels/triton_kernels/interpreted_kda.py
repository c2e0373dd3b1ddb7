"""KDA's Triton kernels on CPU tensors against float64; run by test_interpreter.py.

Needs TRITON_INTERPRET=1. The fixture `poisoned` of interpreted_kernels.py applies here, too.
"""

from __future__ import annotations

import functools

import pytest
import torch
from fla.ops.quasar.fused_recurrent import launch_fused_recurrent

from quasar_kernels.delta_reference import delta_recurrence
from quasar_kernels.delta_rule.kda_triton.launch import kda_triton
from tests.quasar_kernels.delta_rule.calls import inputs, wide
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import RECURRENCE
from tests.quasar_kernels.triton_kernels.interpreted_kernels import poisoned  # noqa: F401

LIMITS = {torch.float32: 1e-6, torch.float16: 1.5e-3}
drawn = functools.partial(inputs, channels=True)


def mixed(T, **options):
    """Draw inputs with decays of -110, -1e-3 and 0 next to each other, in tokens and channels."""
    x = drawn(T, **options)
    kinds = torch.tensor([-110.0, -1e-3, 0.0, -1.0, -30.0])
    return x._replace(g=kinds[torch.randint(5, x.g.shape)])


def compare(x, bounds=None, segments=None):
    """Compare o, the final state and all gradients with float64."""
    sequences = 1 if bounds is None else len(bounds) - 1
    state = torch.randn(sequences, x.v.shape[2], x.q.shape[3], x.q.shape[3])

    def run(q, k, v, beta, g, state):
        return kda_triton(q, k, v, g, beta, state, True, bounds, 0.5, segments)

    def exact(*leaves):
        return delta_recurrence(*wide(type(x)(*leaves[:5])), leaves[5], bounds, scale=0.5)

    check(*with_float64(run, exact, *x, state), LIMITS[x.q.dtype])


@pytest.mark.parametrize(
    ("dtype", "T", "S", "segments"),
    [
        (torch.float32, 40, 16, 1),
        (torch.float32, 90, 24, 2),
        (torch.float16, 150, 16, 2),
        (torch.float16, 70, 64, 1),
    ],
    ids=str,
)
def test_values_and_gradients(dtype, T, S, segments):
    compare(drawn(T, H=1, K=S, dtype=dtype), segments=segments)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_strong_decays_next_to_weak_ones(dtype):
    compare(mixed(80, H=1, dtype=dtype), segments=1)


def test_packed_sequences_of_grouped_heads():
    compare(mixed(60, H=1, group=2), packed([0, 1, 37, 0, 22, 0]))


def test_decays_to_zero():
    x = drawn(40, H=1)
    x.g[:, ::7] = -float("inf")
    o, _ = kda_triton(x.q, x.k, x.v, x.g, x.beta, None, False, None, 0.5)
    check([o], [delta_recurrence(*wide(x), scale=0.5)[0]], LIMITS[torch.float32])


def test_the_past_does_not_depend_on_the_future():
    x = drawn(50, H=1, dtype=torch.float16)

    def run(y):
        return kda_triton(y.q, y.k, y.v, y.g, y.beta, None, False, None, 0.5)[0]

    o = run(x)
    for t in (1, 17, 32):
        later = type(x)(*(torch.cat([y[:, :t], y[:, t:].flip(1)], 1) for y in x))
        assert torch.equal(run(later)[:, :t], o[:, :t]), t


@pytest.mark.parametrize("group", [1, 3])
def test_the_recurrent_kernel_with_decays_per_channel(group):
    x, state = mixed(6, K=24, group=group), torch.randn(1, 2 * group, 24, 24)
    wanted = delta_recurrence(*wide(x), state, scale=0.5)
    o, final = launch_fused_recurrent(*x[:4], state, True, None, 0.5, g=x.g)
    check((o, final), wanted, RECURRENCE[torch.float32])
