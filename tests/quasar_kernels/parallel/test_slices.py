"""One sequence over 2 to 4 processes against one process in float64."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar import chunk_quasar
from fla.ops.quasar.parallel.context import locate, place_of

from quasar_kernels.delta_reference import delta_chunked
from quasar_kernels.reference import quasar_chunked, relative_rms
from tests.processes import wait_for
from tests.quasar_kernels.delta_rule.calls import inputs
from tests.quasar_kernels.inputs import common_key, layer_like
from tests.quasar_kernels.parallel.processes import result_of, run_ranks, start_ranks
from tests.quasar_kernels.parallel.slices import Case, call_until_killed, run_cases
from tests.quasar_kernels.tolerances import OPERATOR

pytestmark = pytest.mark.slow

LENGTHS = {2: [150, 270], 3: [100, 60, 260], 4: [90, 0, 110, 220]}
PACKED = [0, 30, 200, 201, 420]
EXACT, ROUNDED = torch.float64, torch.float32


def quasar_case(lengths, bounds, dtype=EXACT, **more):
    T = sum(lengths)
    q, k, v, beta = layer_like(T, dtype=dtype)
    names = dict(zip(("q", "k", "v", "beta"), (q, k, v, beta.to(dtype)), strict=True))
    return Case("quasar", names, torch.randn_like(v), bounds, lengths, **more)


def delta_case(rule, lengths, bounds, dtype=EXACT, decay=0.1):
    options = {"dtype": dtype, "decay": decay, "channels": rule == "kda"}
    x = inputs(sum(lengths), V=24, group=2, **options)
    names = {name: getattr(x, name).to(dtype) for name in ("q", "k", "v", "beta", "g")}
    if rule == "delta":
        del names["g"]
    return Case(rule, names, torch.randn_like(x.v), bounds, lengths)


def expected(case):
    """Return the results and gradients of one process in float64."""
    leaves = {name: x.double().requires_grad_() for name, x in case.inputs.items()}
    if case.initial_state is not None:
        leaves["initial_state"] = case.initial_state.double().requires_grad_()
    bounds = torch.tensor(case.bounds)
    if case.rule == "quasar":
        o, final = quasar_chunked(**leaves, cu_seqlens=bounds)
    else:
        group = leaves["v"].shape[2] // leaves["q"].shape[2]
        q, k = (leaves[name].repeat_interleave(group, 2) for name in ("q", "k"))
        others = {name: x for name, x in leaves.items() if name not in "qk"}
        scale = q.shape[-1] ** -0.5
        o, final = delta_chunked(q, k, **others, cu_seqlens=bounds, scale=scale)
    results, incoming = [o], [case.do.double()]
    if case.d_final is not None:
        results, incoming = [o, final], [*incoming, case.d_final.double()]
    grads = torch.autograd.grad(results, [*leaves.values()], incoming)
    return {"o": o, "final": final, **dict(zip(leaves, grads, strict=True))}


def joined(case, ranks):
    """Return the results of all ranks as those of one process."""
    whole = {"final": ranks[-1]["final"][-1:]}
    for name in ("o", *case.inputs):
        slices = [results[name] for results in ranks]
        is_sum = name == "beta" and case.inputs["beta"].ndim == 1
        whole[name] = sum(slices) if is_sum else torch.cat(slices, 1)
    return whole


@pytest.mark.parametrize("world", LENGTHS)
def test_ranks_give_the_results_and_gradients_of_one_process(world):
    lengths = LENGTHS[world]
    cases = [
        quasar_case(lengths, [0, 420]),
        quasar_case(lengths, PACKED),
        delta_case("delta", lengths, PACKED),
        delta_case("gated", lengths, [0, 420]),
        delta_case("gated", lengths, PACKED, decay=2.0),
        delta_case("kda", lengths, PACKED, decay=2.0),
        quasar_case(lengths, [0, 420], ROUNDED),
        delta_case("gated", lengths, PACKED, ROUNDED),
    ]
    ranks = run_ranks(world, run_cases, cases)
    for n, case in enumerate(cases):
        exact = expected(case)
        exact["final"] = exact["final"][-1:]
        for name, result in joined(case, [results[n] for results in ranks]).items():
            error = relative_rms(result, exact[name])
            assert error <= OPERATOR[case.do.dtype], (case.rule, case.bounds, name)


def test_bursts_slow_decay_and_similar_keys():
    lengths = LENGTHS[3]
    burst, slow, similar = (quasar_case(lengths, [0, 420], ROUNDED) for _ in range(3))
    burst.inputs["v"][:, 20:30] *= 30_000
    burst.inputs["k"].mul_(4)
    slow.inputs["beta"].mul_(1e-4)
    similar.inputs["k"].copy_(common_key(similar.inputs["k"], 0.01))
    cases = [burst, slow, similar]
    ranks = run_ranks(3, run_cases, cases)
    for n, case in enumerate(cases):
        o = torch.cat([results[n]["o"] for results in ranks], 1)
        exact = quasar_chunked(**case.inputs)[0]
        one = chunk_quasar(**case.inputs)[0]
        error = relative_rms(o[:, -100:], exact[:, -100:])
        assert error <= 2 * relative_rms(one[:, -100:], exact[:, -100:]) + 1e-6


def test_states_enter_on_the_first_rank_and_leave_on_the_last():
    state = torch.randn(1, 2, 16, 16, dtype=EXACT)
    case = quasar_case(LENGTHS[3], [0, 420], initial_state=state, d_final=torch.randn_like(state))
    ranks = [results[0] for results in run_ranks(3, run_cases, [case])]
    exact = expected(case)
    assert relative_rms(ranks[0]["initial_state"], exact["initial_state"]) <= 1e-12
    assert not any(results["initial_state"].any() for results in ranks[1:])
    for name, result in joined(case, ranks).items():
        assert relative_rms(result, exact[name]) <= 1e-12


def test_contexts_of_fla_give_the_same_bits():
    cases = [quasar_case([210, 210], PACKED), delta_case("gated", [210, 210], PACKED)]
    ours, with_fla = (run_ranks(2, run_cases, cases, fla) for fla in (False, True))
    for rank in range(2):
        for a, b in zip(ours[rank], with_fla[rank], strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)


def test_all_ranks_fail_when_one_is_killed():
    case = quasar_case(LENGTHS[3], [0, 420])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save((call_until_killed, (case, name)), folder / "call.pt")
        ranks = start_ranks(folder, 3)
        wait_for(lambda: (folder / "1.calls").exists())
        ranks[1].kill()
        for rank in (0, 2):
            wait_for(lambda rank=rank: (folder / f"{rank}.done").exists())
            assert "a rank has ended" in result_of(folder, rank)
            ranks[rank].kill()


@pytest.mark.parametrize(
    ("lengths", "rank", "local"),
    [
        ([150, 270], 1, ([0, 50, 51, 270], 1, 0, 120)),
        ([100, 60, 260], 1, ([0, 60], 1, 1, 70)),
        ([90, 0, 110, 220], 1, ([0, 0], 1, 1, 60)),
        ([200, 0, 220], 1, ([0, 0], 0, 0, 0)),  # between two sequences
        ([200, 220], 1, ([0, 1, 220], 0, 0, 0)),
    ],
)
def test_bounds_and_neighbours_of_a_slice(lengths, rank, local):
    assert locate(PACKED, lengths, rank) == local


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (SimpleNamespace(layout="zigzag"), "layout"),
        (SimpleNamespace(layout="contiguous", group=None, cu_seqlens=None), "needs a group"),
        (
            SimpleNamespace(group=1, cu_seqlens=torch.tensor([0, 5]), cu_seqlens_cpu=None),
            "of 5 tokens",
        ),
    ],
)
def test_contexts_that_do_not_fit_are_refused(context, message):
    with pytest.raises(ValueError, match=message):
        place_of(context, 7)
