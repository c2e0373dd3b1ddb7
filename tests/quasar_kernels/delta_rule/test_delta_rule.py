"""The delta rule's functions on a CPU, KDA included, against the recurrence in float64."""

import pytest
import torch
import torch.nn.functional as F

from quasar_kernels.delta_reference import delta_chunked, delta_recurrence
from quasar_kernels.delta_rule.heads import Heads
from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.delta_rule.calls import (
    GATED,
    PLAIN,
    gated_rules,
    inputs,
    rules,
)
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import ADVERSARIAL, GRADIENT, OPERATOR

LIMIT = 1e-6
"""Of fp32 results on layer-like inputs; gradients and difficult inputs have their own limits."""


@rules
@pytest.mark.parametrize(
    ("T", "shape"),
    [(1, {}), (65, {}), (130, {}), (70, {"V": 24}), (70, {"V": 8}), (70, {"group": 3})],
    ids=str,
)
def test_results_match_float64(rule, T, shape):
    x = rule.draw(T, B=2, **shape)
    state = torch.randn(2, x.v.shape[2], 16, x.v.shape[3])
    found = rule.call(x, initial_state=state, output_final_state=True)
    check(found, rule.exact(x, state), LIMIT)
    assert found[0].shape == x.v.shape


@gated_rules
@pytest.mark.parametrize("dtype", OPERATOR)
def test_every_dtype(rule, dtype):
    x = rule.draw(200, dtype=dtype)
    o, final = rule.call(x, output_final_state=True, scale=2.0)
    assert o.dtype == dtype
    assert final.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # g and beta are fp32
    check((o, final), rule.exact(x, scale=2.0), max(OPERATOR[dtype], LIMIT))


@rules
@pytest.mark.parametrize("expanded", [False, True])
def test_packed_sequences_and_their_gradients(rule, expanded):
    lengths = [0, 1, 70, 0, 64, 65, 0]
    x, bounds = rule.draw(sum(lengths), group=2), packed(lengths)
    state = torch.randn(1 if expanded else len(lengths), 4, 16, 16).expand(len(lengths), -1, -1, -1)
    count = 5 if rule.gated else 4

    def run(*leaves):
        options = {"initial_state": leaves[-1], "output_final_state": True, "cu_seqlens": bounds}
        return rule.call(type(x)(*leaves[:count], *x[count:]), **options)

    def exact(*leaves):
        return rule.exact(type(x)(*leaves[:count], *x[count:]), leaves[-1], bounds)

    check(*with_float64(run, exact, *x[:count], state), GRADIENT[torch.float32])


@gated_rules
@pytest.mark.parametrize("decay", [0.0, 1e-4, 30.0, 1000.0])
def test_any_decay(rule, decay):
    x = rule.draw(200, decay=decay)
    o, _ = rule.call(x)
    check([o], [rule.exact(x)[0]], LIMIT)
    if decay == 0 and x.g.ndim == 3:
        same = PLAIN["chunk" if rule is GATED["gated chunk"] else "recurrent"]
        assert torch.equal(o, same.call(x)[0])


@gated_rules
def test_a_decay_to_zero_resets_the_state(rule):
    x = rule.draw(100)
    x.g[:, 50] = float("-inf")
    o, _ = rule.call(x)
    fresh, _ = rule.call(type(x)(*(y[:, 50:] for y in x)))
    assert torch.isfinite(o).all()
    assert relative_rms(o[:, 50:], fresh) <= LIMIT


@gated_rules
@pytest.mark.parametrize("strong", [10.0, 110.0, 1e4])
def test_strong_decays_leave_the_digits_of_later_weak_ones(rule, strong):
    x = rule.draw(64)
    x.g[:, :50] = -strong
    results = with_float64(
        lambda *y: rule.call(type(x)(*y))[0], lambda *y: rule.exact(type(x)(*y))[0], *x
    )
    check(*([y[:, 50:] for y in result] for result in results), 2e-6)


@rules
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["q", "k", "v", "beta", "g"])
def test_a_value_that_is_not_finite_does_not_reach_earlier_tokens(rule, value, place):
    x = rule.draw(70, H=1)
    before, _ = rule.call(x)
    for t in (0, 15, 16, 63, 64):
        wrong = getattr(x, place).clone()
        wrong[:, t].view(-1)[0] = value
        after, _ = rule.call(x._replace(**{place: wrong}))
        assert torch.equal(after[:, :t], before[:, :t]), t
        if place in "kv":  # the state keeps it
            assert not after[:, t:, :, 0].isfinite().any()
        if place == "v":  # its columns are independent
            assert torch.equal(after[..., 1:], before[..., 1:])


@pytest.mark.parametrize("rule", PLAIN.values(), ids=PLAIN)
def test_step_sizes_up_to_2(rule):
    x = inputs(200)
    x = x._replace(beta=2 * x.beta)
    check([rule.call(x)[0]], [rule.exact(x)[0]], ADVERSARIAL)


@pytest.mark.parametrize(
    ("name", "bound"),
    [*((name, None) for name in GATED), ("KDA chunk", -5.0), ("KDA recurrent", -5.0)],
)
def test_all_options(name, bound):
    rule = GATED[name]
    x = rule.draw(80, B=2, V=24, dtype=torch.float64)
    raw, beta, log = torch.randn_like(x.g), torch.randn(2, 80, 2), torch.rand(2)
    bias, state = torch.randn(raw.shape[2:]), torch.randn(2, 2, 24, 16, dtype=torch.float64)
    more = {} if bound is None else {"lower_bound": bound}
    if name == "KDA chunk" and bound is not None:
        more["safe_gate"] = True
    o, final = rule.call(
        x._replace(q=3 * x.q, k=2 * x.k, beta=beta, g=raw),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        use_gate_in_kernel=True,
        A_log=log,
        dt_bias=bias.flatten(),
        state_v_first=True,
        **more,
    )
    q, k = (F.normalize(y, dim=-1) for y in (x.q, x.k))
    rate, shifted = torch.exp(log).view(2, *[1] * (bias.ndim - 1)), raw + bias
    g = -rate * F.softplus(shifted) if bound is None else bound * torch.sigmoid(rate * shifted)
    wanted = delta_recurrence(q, k, x.v, 2 * beta.sigmoid(), g, state.mT, scale=0.25)
    check((o, final.mT), wanted, 1e-5)  # the normalisation adds 1e-6


@pytest.mark.parametrize("rule", [GATED["gated recurrent"], GATED["KDA recurrent"]])
def test_decoding_in_place(rule):
    x, state = rule.draw(12, group=2), torch.randn(1, 4, 16, 16)
    wanted = rule.exact(x, state)
    steps = []
    for t in range(12):
        token = type(x)(*(y[:, t : t + 1] for y in x))
        o, final = rule.call(token, initial_state=state, inplace_state=True)
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
    check(
        (heads.joined(o), heads.joined_state(final)),
        GATED["gated chunk"].exact(x, state, scale=1.0),
        1e-12,
    )
