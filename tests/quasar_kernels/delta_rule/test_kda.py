"""What only Kimi Delta Attention has: decays per channel, bounded gates, and its errors."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError

from quasar_kernels.delta_reference import delta_chunked, delta_recurrence
from quasar_kernels.delta_rule import kda
from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.delta_rule.calls import chunk_kda, inputs, recurrent_kda, wide
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import ADVERSARIAL_KEYS, packed
from tests.quasar_kernels.tolerances import ADVERSARIAL, GRADIENT

calls = pytest.mark.parametrize("call", [chunk_kda, recurrent_kda], ids=lambda f: f.__name__)
drawn = functools.partial(inputs, channels=True)
EXACT = 1e-6
"""Limit of fp32 results on layer-like inputs."""


def expected(x, *arguments, **options):
    """Compute a call with inputs x in float64."""
    return delta_recurrence(*wide(x), *arguments, **{"scale": 0.25} | options)


def mixed(T: int, **options):
    """Draw inputs with decays of -110, -1e-3 and 0 next to each other, in tokens and channels."""
    x = drawn(T, **options)
    kinds = torch.tensor([-110.0, -1e-3, 0.0, -1.0, -30.0])
    return x._replace(g=kinds[torch.randint(5, x.g.shape)].to(x.g.dtype))


@calls
def test_gradients_of_decays_that_differ_between_channels(call):
    bounds = packed([0, 1, 40, 0, 32, 17, 0])
    x, state = mixed(90, group=2), torch.randn(7, 4, 16, 16)

    def run(*leaves):
        options = {"initial_state": leaves[5], "output_final_state": True, "cu_seqlens": bounds}
        return call(type(x)(*leaves[:5]), **options)

    def exact(*leaves):
        return expected(type(x)(*leaves[:5]), leaves[5], bounds)

    check(*with_float64(run, exact, *x, state), GRADIENT[torch.float32])


@calls
@pytest.mark.parametrize("kind", ADVERSARIAL_KEYS)
def test_adversarial_keys(call, kind):
    x = mixed(100, dtype=torch.float64)
    k = ADVERSARIAL_KEYS[kind](x.k)
    size = k.square().sum(-1)
    x = x._replace(k=k.float(), q=x.q.float(), v=x.v.float())
    x = x._replace(beta=(x.beta / size.clamp(min=1)).float())  # the state must not grow
    check(call(x, output_final_state=True), expected(x), ADVERSARIAL)


@calls
def test_strong_decays_leave_the_digits_of_weak_ones(call):
    x = drawn(64)
    g = torch.where(torch.rand(x.g.shape) < 0.1, -110.0, -1e-3)
    x = x._replace(g=g)
    check(*with_float64(lambda *y: call(type(x)(*y))[0], lambda *y: expected(type(x)(*y))[0], *x),
          2e-6)  # fmt: skip


def test_a_gate_with_a_bound_needs_no_rates():
    x = drawn(20)
    o, _ = chunk_kda(x, use_gate_in_kernel=True, lower_bound=-2.0)
    wanted = expected(x._replace(g=-2 * x.g.double().sigmoid()))[0]
    assert relative_rms(o, wanted) <= EXACT


def test_long_calls_keep_only_blocks(monkeypatch):
    from fla.ops.quasar import chunk_torch

    x = drawn(150)
    results = []
    for block in (chunk_torch.BLOCK_ELEMENTS, 1 << 14):
        monkeypatch.setattr(chunk_torch, "BLOCK_ELEMENTS", block)
        results.append(with_float64(lambda *y: chunk_kda(type(x)(*y))[0],
                                    lambda *y: expected(type(x)(*y))[0], *x))  # fmt: skip
    for found, wanted in results:
        check(found, wanted, GRADIENT[torch.float32])


def test_the_chunked_definition_is_the_recurrence():
    x = mixed(70, dtype=torch.float64)
    check(delta_chunked(*x, scale=0.25, chunk=16), expected(x), 1e-12)


@calls
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"g": lambda x: x[..., 0]}, "g must have shape [1, 5, 2, 16]; got [1, 5, 2]"),
        ({"use_gate_in_kernel": True}, "needs A_log of 2 values, or a lower_bound"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, "A_log must have shape [2]"),
        ({"use_gate_in_kernel": True, "A_log": 1.0}, "got float, not a tensor"),
        (
            {"use_gate_in_kernel": True, "lower_bound": -1.0, "dt_bias": torch.zeros(2)},
            "dt_bias must have shape [32]; got [2]",
        ),
        ({"use_gate_in_kernel": True, "lower_bound": 1.0}, "must be negative; got 1.0"),
        ({"chunk_size": 20}, "chunk_size is 20"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_errors_name_the_argument(call, change, words):
    x = drawn(5)
    options = {name: value for name, value in change.items() if name not in x._fields}
    wrong = {name: of(getattr(x, name)) for name, of in change.items() if name in x._fields}
    with pytest.raises(ValueError, match=re.escape(words)):
        call(x._replace(**wrong), **options)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"use_graph": True}, "not supported"),
        ({"return_intermediate_states": True}, "not supported"),
        ({"max_num_seqs": 4}, "not supported"),
        ({"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.zeros(2)}, "got None"),
        ({"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -9.0}, "got -9.0"),
    ],
    ids=str,
)
def test_options_of_whole_sequences_that_are_refused(option, words):
    with pytest.raises(ValueError, match=words):
        chunk_kda(drawn(5), **option)


def test_cuda_kernels_that_do_not_exist_cannot_be_requested(monkeypatch):
    monkeypatch.setattr(kda, "has_kernels", lambda q: True)
    monkeypatch.setenv("QUASAR_BACKEND", "cuda")
    with pytest.raises(CudaUnavailableError, match="also need Triton kernels"):
        chunk_kda(drawn(5))
