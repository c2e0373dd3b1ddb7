"""The four functions on a CPU, against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quasar_kernels.delta_reference import delta_chunked, delta_recurrence
from quasar_kernels.delta_rule.heads import Heads
from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.delta_rule.calls import chunk, inputs, recurrent, used, wide
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import ADVERSARIAL, GRADIENT, OPERATOR

calls = pytest.mark.parametrize("call", [chunk, recurrent], ids=lambda f: f.__name__)
gates = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
LIMIT = OPERATOR[torch.float32]


def expected(x, gated, *arguments, **options):
    """Compute a call with inputs x in float64."""
    return delta_recurrence(*wide(used(x, gated)), *arguments, **options)


@calls
@gates
@pytest.mark.parametrize(
    ("T", "shape"),
    [(1, {}), (65, {}), (130, {}), (70, {"V": 24}), (70, {"V": 8}), (70, {"group": 3})],
    ids=str,
)
def test_results_match_float64(call, gated, T, shape):
    x = inputs(T, B=2, **shape)
    state = torch.randn(2, x.v.shape[2], 16, x.v.shape[3])
    found = call(x, gated, initial_state=state, output_final_state=True)
    check(found, expected(x, gated, state, scale=0.25), LIMIT)
    assert found[0].shape == x.v.shape


@calls
@pytest.mark.parametrize("dtype", OPERATOR)
def test_every_dtype(call, dtype):
    x = inputs(200, dtype=dtype)
    o, final = call(x, True, output_final_state=True, scale=2.0)
    assert o.dtype == dtype
    assert final.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wanted = expected(x, True, scale=2.0)
    # g and beta are fp32
    check((o, final), wanted, max(OPERATOR[dtype], 1e-6))


@calls
@gates
def test_packed_sequences_equal_separate_calls(call, gated):
    lengths = [0, 1, 70, 0, 64, 65, 0]
    x = inputs(sum(lengths))
    state = torch.randn(len(lengths), 2, 16, 16)
    bounds = packed(lengths)
    found = call(x, gated, initial_state=state, output_final_state=True, cu_seqlens=bounds)
    check(found, expected(x, gated, state, bounds, scale=0.25), LIMIT)


@calls
@gates
def test_gradients_match_float64(call, gated):
    x, state = inputs(90, group=2), torch.randn(1, 4, 16, 16)
    count = 5 if gated else 4
    bounds = packed([30, 0, 60])

    def run(*leaves):
        y = type(x)(*leaves[:count], *x[count:])
        start = leaves[count].expand(3, -1, -1, -1)
        return call(y, gated, initial_state=start, output_final_state=True, cu_seqlens=bounds)

    def exact(*leaves):
        y = wide(used(type(x)(*leaves[:count], *x[count:]), gated))
        start = leaves[count].expand(3, -1, -1, -1)
        return delta_recurrence(*y, start, bounds, scale=0.25)

    check(*with_float64(run, exact, *x[:count], state), GRADIENT[torch.float32])


@calls
@pytest.mark.parametrize("decay", [0.0, 1e-4, 30.0, 1000.0])
def test_any_decay(call, decay):
    x = inputs(200, decay=decay)
    o, _ = call(x, True)
    check([o], [expected(x, True, scale=0.25)[0]], LIMIT)
    if decay == 0:
        assert torch.equal(o, call(x, False)[0])


@calls
def test_a_decay_to_zero_resets_the_state(call):
    x = inputs(100)
    g = x.g.clone()
    g[:, 50] = float("-inf")
    o, _ = call(x._replace(g=g), True)
    fresh, _ = call(type(x)(*(y[:, 50:] for y in x)), True)
    assert torch.isfinite(o).all()
    assert relative_rms(o[:, 50:], fresh) <= LIMIT


@calls
@pytest.mark.parametrize("strong", [10.0, 110.0, 1e4])
def test_strong_decays_leave_the_digits_of_later_weak_ones(call, strong):
    x = inputs(64)
    x.g[:, :50] = -strong
    results = with_float64(
        lambda *y: call(type(x)(*y), True)[0],
        lambda *y: delta_recurrence(*wide(type(x)(*y)), scale=0.25)[0],
        *x,
    )
    check(*([y[:, 50:] for y in result] for result in results), 2e-6)


@calls
@gates
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["q", "k", "v", "beta", "g"])
def test_a_value_that_is_not_finite_does_not_reach_earlier_tokens(call, gated, value, place):
    x = inputs(150, H=1)
    before, _ = call(x, gated)
    for t in (0, 30, 63, 64, 100):
        wrong = getattr(x, place).clone()
        wrong[:, t].view(-1)[0] = value
        after, _ = call(x._replace(**{place: wrong}), gated)
        assert torch.equal(after[:, :t], before[:, :t]), t
        if place in "kv":  # the state keeps it
            assert not after[:, t:, :, 0].isfinite().any()
        if place == "v":  # its columns are independent
            assert torch.equal(after[..., 1:], before[..., 1:])


@calls
def test_step_sizes_up_to_2(call):
    x = inputs(200)
    x = x._replace(beta=2 * x.beta)
    check([call(x, False)[0]], [expected(x, False, scale=0.25)[0]], ADVERSARIAL)


@calls
def test_all_options(call):
    x = inputs(80, B=2, V=24, dtype=torch.float64)
    raw, log, bias = torch.randn(2, 80, 2), torch.rand(2), torch.randn(2)
    state = torch.randn(2, 2, 24, 16, dtype=torch.float64)
    o, final = call(
        x._replace(q=3 * x.q, k=2 * x.k, beta=raw, g=raw),
        True,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        use_gate_in_kernel=True,
        A_log=log,
        dt_bias=bias,
        state_v_first=True,
    )
    q, k = (F.normalize(y, dim=-1) for y in (x.q, x.k))
    g = -torch.exp(log) * F.softplus(raw + bias)
    wanted = delta_recurrence(q, k, x.v, 2 * raw.sigmoid(), g, state.mT, scale=0.25)
    check((o, final.mT), wanted, 1e-5)  # the normalisation adds 1e-6


def test_decoding_in_place():
    x, state = inputs(12, group=2), torch.randn(1, 4, 16, 16)
    wanted = expected(x, True, state, scale=0.25)
    steps = []
    for t in range(12):
        token = type(x)(*(y[:, t : t + 1] for y in x))
        o, final = recurrent(token, True, initial_state=state, inplace_state=True)
        assert final is state
        steps.append(o)
    check((torch.cat(steps, 1), state), wanted, LIMIT)


@pytest.mark.parametrize("values", [8, 16, 24, 48])
def test_split_and_padded_heads_give_the_same_results(values):
    x, state = inputs(50, V=values, group=2), torch.randn(1, 4, 16, values)
    heads = Heads(16, values, True)
    v = heads.cut(x.v)
    q, k = (y.repeat_interleave(v.shape[2] // 2, 2) for y in (x.q, x.k))
    o, final = delta_chunked(
        q, k, v, heads.scalars(x.beta), heads.scalars(x.g), heads.cut_state(state)
    )
    check((heads.joined(o), heads.joined_state(final)), expected(x, True, state), 1e-12)
