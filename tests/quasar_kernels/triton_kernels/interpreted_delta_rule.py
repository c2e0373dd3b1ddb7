"""The delta rule's Triton kernels on CPU tensors against float64; run by test_interpreter.py.

Needs TRITON_INTERPRET=1. The fixture `poisoned` of interpreted_kernels.py applies here, too.
"""

import functools

import pytest
import torch
from fla.ops.quasar import checkpoints
from fla.ops.quasar.backend import scan_forward
from fla.ops.quasar.chunk import ChunkQuasarFunction
from fla.ops.quasar.fused_recurrent import RecurrentTiles, launch_fused_recurrent
from fla.ops.quasar.operator_types import ScanInputs
from fla.ops.quasar.preparation import UNCHANGED, Preparation, PreparationFunction, prepare
from fla.ops.quasar.triton_kernels import passes

from quasar_kernels.delta_reference import delta_recurrence
from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.delta_rule.calls import inputs, used, wide
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import OPERATOR
from tests.quasar_kernels.triton_kernels.interpreted_kernels import poisoned  # noqa: F401

gates = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
LIMITS = {torch.float32: 4e-6, torch.float16: 1.5e-3}


def check_gradients(x, gated, state, cu=None):
    """Compare o, the final state and all gradients with float64."""
    check(*found_and_wanted(x, gated, state, cu), LIMITS[x.q.dtype])


def found_and_wanted(x, gated, state, cu=None):
    """Return o, the final state and all gradients, of the kernels and of float64."""
    count = 5 if gated else 4

    def run(q, k, v, beta, *rest):
        g = rest[0] if gated else None
        return ChunkQuasarFunction.apply(
            "auto", True, UNCHANGED, q, k, v, beta, rest[-1], cu, 0.5, g
        )

    def exact(*leaves):
        y = used(type(x)(*leaves[:count], *x[count:]), gated)
        return delta_recurrence(*wide(y), leaves[-1], cu, scale=0.5)

    return with_float64(run, exact, *x[:count], state)


@gates
@pytest.mark.parametrize(
    ("dtype", "T", "S", "segments"),
    [
        (torch.float32, 34, 16, 3),
        (torch.float16, 34, 16, 3),
        (torch.float32, 20, 24, 1),
        (torch.float16, 20, 64, 1),
    ],
)
def test_values_and_gradients(monkeypatch, gated, dtype, T, S, segments):
    plan = functools.partial(passes.plan_segments, segments=segments)
    monkeypatch.setattr(passes, "plan_segments", plan)
    check_gradients(inputs(T, K=S, dtype=dtype), gated, torch.randn(1, 2, S, S))


@gates
def test_packed_sequences_of_grouped_heads(gated):
    x = inputs(30, H=1, group=2)
    check_gradients(x, gated, torch.randn(5, 2, 16, 16), packed([0, 1, 20, 0, 9]))


@gates
def test_gradients_of_step_sizes_of_zero(gated):
    x = inputs(20, H=1)
    x.beta[:, ::3] = 0
    check_gradients(x, gated, torch.randn(1, 1, 16, 16))


@pytest.mark.parametrize("decay", [0.0, 3.0])
def test_gradients_of_other_decays(decay):
    check_gradients(inputs(20, H=1, decay=decay), True, torch.randn(1, 1, 16, 16))


def test_gradients_of_strong_decays_are_accurate():
    x = inputs(40, decay=2.0, dtype=torch.float16)
    x.g.sub_(7.0)  # each token reduces the state, and its decay's gradient, to a thousandth
    found, wanted = found_and_wanted(x, True, torch.randn(1, 2, 16, 16))
    decays = [(y, w) for y, w in zip(found, wanted, strict=True) if y.shape == x.g.shape][-1]
    assert decays[1].abs().max() < 1e-2
    assert relative_rms(*decays) <= 3e-3


def test_strong_decays_leave_the_digits_of_later_weak_ones(monkeypatch):
    plan = functools.partial(passes.plan_segments, segments=2)
    monkeypatch.setattr(passes, "plan_segments", plan)
    x = inputs(64, H=1)
    is_late = torch.arange(64) % 16 >= 12  # weak after strong ones in each chunk
    x.g[:, ~is_late] = -110.0
    found, wanted = found_and_wanted(x, True, torch.randn(1, 1, 16, 16))
    late = [
        (y[:, is_late], w[:, is_late])
        for y, w in zip(found, wanted, strict=True)
        if y.shape[1] == 64
    ]
    assert len(late) == 6
    check(*zip(*late, strict=True), 2e-6)


@pytest.mark.parametrize("decay", [100.0, float("inf")])
def test_decays_to_zero(decay):
    x = inputs(50, H=1, decay=0.1)
    x.g[:, ::7] = -decay
    found = scan_forward(ScanInputs.of(*x[:4], g=x.g), backend="auto")
    assert relative_rms(found.o, delta_recurrence(*wide(x))[0]) <= OPERATOR[torch.float32]


@gates
@pytest.mark.parametrize(
    ("group", "cu", "tiles"), [(1, None, None), (3, [0, 0, 1, 4, 4], RecurrentTiles(32, 1))]
)
def test_the_recurrent_kernel_overwrites_the_state(gated, group, cu, tiles):
    x = inputs(4, K=24, group=group)
    bounds = None if cu is None else torch.tensor(cu).repeat_interleave(2)[::2]  # strided
    state = torch.randn(1 if cu is None else 4, 2 * group, 24, 24)
    expected, end = delta_recurrence(*wide(used(x, gated)), state, bounds, scale=0.5)
    options = {"inplace_state": True, "g": x.g if gated else None, "tiles": tiles}
    o, final = launch_fused_recurrent(*x[:4], state, False, bounds, 0.5, **options)
    assert final is state
    assert relative_rms(o, expected) <= OPERATOR[torch.float32]
    assert relative_rms(state, end) <= OPERATOR[torch.float32]


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.float32, Preparation(True)),
        (torch.float32, Preparation(False, 1.0)),
        (torch.float16, Preparation(True, 2.0)),
    ],
)
def test_units_and_sigmoids_within_the_operator(dtype, how):
    """q and k are views of one projection, beta has other strides; a key and a query are zero."""
    qk, v = (torch.randn(2, 19, 3, 2, 24) / 6).to(dtype), torch.randn(2, 19, 4, 24).to(dtype)
    qk[1, 3] = 0
    beta = (torch.randn if how.factor else torch.rand)(2, 4, 19).to(dtype)

    def operator(apply, qk, v, beta):
        _, k, q = qk.unbind(2)
        return apply(q, k, v, beta.mT)

    def run(q, k, v, beta):
        return ChunkQuasarFunction.apply("auto", True, how, q, k, v, beta, None, None, 0.5, None)

    def exact(q, k, v, beta):
        if how.unit:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        beta = how.factor * beta.sigmoid() if how.factor else beta
        q, k = (x.repeat_interleave(2, 2) for x in (q, k))
        return delta_recurrence(q, k, v, beta, torch.zeros_like(beta), scale=0.5)

    found = with_float64(
        functools.partial(operator, run), functools.partial(operator, exact), qk, v, beta
    )
    check(*found, {torch.float32: 4e-6, torch.float16: 3e-3}[dtype])


def test_the_node_of_units_and_sigmoids():
    q, k, beta = torch.randn(1, 50, 3, 40), torch.randn(1, 50, 3, 40), torch.randn(1, 50, 6)
    how = Preparation(True, 1.0)

    def run(*leaves):
        return PreparationFunction.apply(how, *leaves)

    check(*with_float64(run, functools.partial(prepare, how), q, k, beta), 1e-6)


@gates
@pytest.mark.parametrize(("every", "bounds"), [(32, None), (64, None), (32, [0, 1, 33, 33, 97])])
def test_states_after_every_n_tokens(monkeypatch, gated, every, bounds):
    monkeypatch.setattr(checkpoints, "has_kernels", lambda _: True)
    monkeypatch.setattr(checkpoints, "IN_ONE_PASS", every)
    monkeypatch.setenv("QUASAR_BACKEND", "triton")
    x = inputs(97, B=2 if bounds is None else 1, H=1)
    cu = None if bounds is None else torch.tensor(bounds)
    state = torch.randn(2 if bounds is None else 4, 1, 16, 16)
    g = x.g if gated else None
    o, final, found = checkpoints.run_with_checkpoints(every, *x[:4], state, cu, 1.0, g)
    y = wide(used(x, gated))
    for result, wanted in zip((o, final), delta_recurrence(*y, state, cu), strict=True):
        assert relative_rms(result, wanted) <= LIMITS[torch.float32]
    place = 0
    for n, (start, stop) in enumerate(zip(bounds or [0], (bounds or [0, 97])[1:], strict=False)):
        entering = state if bounds is None else state[n : n + 1]
        for end in range(start + every, stop + 1, every):
            wanted = delta_recurrence(*(z[:, start:end] for z in y), entering)[1]
            assert relative_rms(found[:, place], wanted) <= LIMITS[torch.float32]
            place += 1
    assert place == found.shape[1]
