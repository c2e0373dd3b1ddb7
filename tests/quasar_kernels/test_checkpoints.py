"""States after every n tokens: against float64, and to continue from them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from fla.ops.quasar import chunk_quasar

from quasar_kernels.delta_reference import delta_recurrence
from quasar_kernels.reference import quasar_recurrence, relative_rms
from tests.quasar_kernels.delta_rule.calls import Inputs, chunk, inputs, used, wide
from tests.quasar_kernels.inputs import packed

BETA = torch.tensor([0.5, 1.5])


def quasar(x: Inputs, **options):
    """Call the operator, whose step sizes are not those of `x`."""
    return chunk_quasar(*x[:3], BETA, **options)


def exact_quasar(x: Inputs, state):
    """Return the exact results of `quasar`."""
    return quasar_recurrence(*x[:3], BETA, state)


def delta(gated: bool):
    """Return a function of the delta rule, and one that returns its exact results."""
    return (
        lambda x, **options: chunk(x, gated, scale=1.0, **options),
        lambda x, state: delta_recurrence(*wide(used(x, gated)), state),
    )


CALLS = {"quasar": (quasar, exact_quasar), "delta": delta(False), "gated": delta(True)}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def part(x: Inputs, start: int, stop: int | None = None) -> Inputs:
    return Inputs(*(y[:, start:stop] for y in x))


def check(call, x: Inputs, every: int, state, bounds=None) -> None:
    """Compare checkpoints with float64, and the outputs after each with those of the whole call."""
    function, exact = call
    options = {"initial_state": state, "cu_seqlens": bounds, "output_final_state": True}
    o, final, found = function(x, checkpoint_every=every, **options)
    plain, plain_final = function(x, **options)
    assert relative_rms(o, plain) <= 1e-6
    assert relative_rms(final, plain_final) <= 1e-6
    ranges = list(pairwise(bounds.tolist())) if bounds is not None else [(0, x.q.shape[1])]
    entries = found.unbind(1)
    place = 0
    for n, (start, stop) in enumerate(ranges):
        own = slice(None) if bounds is None else slice(n, n + 1)
        entering, leaving = state[own], plain_final[own]
        for end in range(start + every, stop + 1, every):
            wanted = exact(part(x, start, end), entering.double())[1]
            error = relative_rms(entries[place], wanted)
            assert error <= 2e-6, (n, end, error)
            rest, last = function(
                part(x, end, stop), initial_state=entries[place], output_final_state=True
            )
            if end < stop:
                assert relative_rms(rest, plain[:, end:stop]) <= 2e-6
            assert relative_rms(last, leaving) <= 2e-6
            place += 1
    assert place == found.shape[1]


@pytest.mark.parametrize(("T", "every"), [(200, 64), (192, 64), (30, 7), (5, 1), (20, 30), (0, 4)])
def test_rows_of_a_batch(call, T, every):
    check(call, inputs(T, B=2), every, torch.randn(2, 2, 16, 16))


def test_packed_sequences(call):
    lengths = [1, 30, 0, 64, 55, 10]
    check(call, inputs(sum(lengths)), 10, torch.randn(6, 2, 16, 16), packed(lengths))


def test_empty_sequences(call):
    o, final, found = call[0](inputs(0), checkpoint_every=8, cu_seqlens=packed([0, 0]))
    assert (o.shape[1], final, found.shape) == (0, None, (1, 0, 2, 16, 16))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_other_widths_of_values_shared_heads_and_layouts(gated):
    x, state = inputs(50, V=40, group=2), torch.randn(1, 4, 16, 40)
    check(delta(gated), x, 16, state)
    if gated:
        first = chunk(x, True, initial_state=state, checkpoint_every=16)[2]
        transposed = {"initial_state": state.mT.contiguous(), "state_v_first": True}
        assert torch.equal(chunk(x, True, **transposed, checkpoint_every=16)[2], first.mT)


def test_gradients_pass_through_checkpoints(call):
    function, exact = call
    x = inputs(40)
    found = []
    for run in (function, exact):
        leaves = Inputs(*(y.detach().clone().requires_grad_() for y in x))
        if run is function:
            loss = run(leaves, checkpoint_every=16)[2].square().sum()
        else:
            loss = sum(run(part(leaves, 0, end), None)[1].square().sum() for end in (16, 32))
        loss.backward()
        found.append([leaves.k.grad, leaves.v.grad])
    for a, b in zip(*found, strict=True):
        assert relative_rms(a, b) <= 1e-5


def test_a_call_without_tokens_is_differentiable(call):
    x = Inputs(*(y.requires_grad_() for y in inputs(0)))
    o, final, found = call[0](x, checkpoint_every=16, output_final_state=True)
    (o.sum() + final.sum() + found.sum()).backward()
    assert x.v.grad.shape == x.v.shape


@pytest.mark.parametrize("wrong", [0, -64, True, 1.5])
def test_impossible_intervals(call, wrong):
    with pytest.raises(ValueError, match="checkpoint_every must be a whole number from 1"):
        call[0](inputs(5), checkpoint_every=wrong)


def test_it_breaks_graphs_of_torch_compile(call):
    torch.compiler.reset()
    x = inputs(20)
    found = torch.compile(call[0], backend="aot_eager")(x, checkpoint_every=8)
    for a, b in zip(found, call[0](x, checkpoint_every=8), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
