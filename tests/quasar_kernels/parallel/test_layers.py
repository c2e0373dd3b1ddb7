"""The layer over several processes against one process: outputs and all gradients."""

import pytest
import torch
from fla.layers.quasar import QuasarCache

from quasar_kernels.blocks import HybridBlock
from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.blocks.test_parameters import UNDECAYED, assert_drawn_alike
from tests.quasar_kernels.parallel.layers import (
    WIDTH,
    Case,
    make_layer,
    reset_shards,
    rotation_of,
    run_layers,
    run_prefill,
)
from tests.quasar_kernels.parallel.processes import run_ranks
from tests.quasar_kernels.tolerances import LAYER_GRADIENT

pytestmark = pytest.mark.slow

LENGTHS = {2: [37, 63], 3: [35, 2, 63]}
LIMIT = LAYER_GRADIENT[torch.float32]


def make_case(lengths, bounds, **more):
    x, dy = torch.randn(2, 1, sum(lengths), WIDTH).unbind()
    return Case(x, dy, bounds, lengths, **more)


def expected(case):
    """Return the results of one process."""
    module, x = case.make(), case.x.clone().requires_grad_()
    rotation = rotation_of(module, slice(0, x.shape[1]))
    y = 2 * module(x, cu_seqlens=torch.tensor(case.bounds), **rotation)[0]
    (y * case.dy).sum().backward()
    grads = {n: p.grad for n, p in module.named_parameters() if "f_proj" not in n}
    return {"y": y, "x": x.grad, **grads}


def assert_equal(cases, ranks):
    """Compare the ranks' results with one process."""
    for n, case in enumerate(cases):
        wanted = expected(case)
        assert all(rank[n].keys() == wanted.keys() for rank in ranks)
        for name, exact in wanted.items():
            slices = [rank[n][name] for rank in ranks]
            joined = torch.cat(slices, 1) if name in "yx" else slices[0]
            error = relative_rms(joined, exact)
            assert error <= LIMIT, (case.bounds, case.wrapped, name, error)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("world", LENGTHS)
def test_outputs_and_gradients(world, adaptive):
    lengths = LENGTHS[world]
    cases = [
        make_case(lengths, [0, 100], adaptive=adaptive),
        # sequences begin in a slice's first tokens
        make_case(lengths, [0, 36, 40, 100], adaptive=adaptive),
        make_case(lengths, [0, 100], conv=False, adaptive=adaptive),
    ]
    assert_equal(cases, run_ranks(world, run_layers, cases))


def test_with_ddp_fsdp_checkpointing_and_compilation():
    kinds = ("ddp", "fsdp", "checkpoint", "compile")
    cases = [
        make_case(LENGTHS[2], [0, 40, 100], wrapped=kind, adaptive=adaptive)
        for kind in kinds
        for adaptive in (False, True)
    ]
    assert_equal(cases, run_ranks(2, run_layers, cases))


def test_ranks_run_the_hooks_of_projections():
    bounds = [0, 100], [0, 36, 40, 100]
    cases = [make_case(LENGTHS[3], each, wrapped="hook") for each in bounds]
    cases.append(make_case(LENGTHS[3], [0, 100], wrapped="hook", conv=False))
    cases.append(make_case(LENGTHS[3], [0, 36, 40, 100], wrapped="hook", adaptive=True))
    assert_equal(cases, run_ranks(3, run_layers, cases))


@pytest.mark.parametrize(("hooked", "adaptive"), [(False, False), (True, False), (False, True)])
def test_decoding_continues_from_the_last_rank_s_cache(hooked, adaptive):
    x, token = torch.randn(1, 100, WIDTH), torch.randn(1, 1, WIDTH)
    y = run_ranks(3, run_prefill, x, LENGTHS[3], token, hooked, adaptive)[-1]
    layer = make_layer(adaptive=adaptive)
    with torch.no_grad():
        whole = layer(torch.cat([x, token], 1), **rotation_of(layer, slice(0, 101)))[0]
    assert relative_rms(y, whole[:, -1:]) <= LIMIT


@pytest.mark.parametrize("adaptive", [False, True])
def test_rows_padding_and_a_cache_for_several_sequences_are_refused(adaptive):
    layer, x, cache = make_layer(adaptive=adaptive), torch.randn(1, 5, WIDTH), QuasarCache()
    context = type("Context", (), {"cu_seqlens_cpu": torch.tensor([0, 2, 5])})()
    with pytest.raises(ValueError, match="one row; got 2 rows"):
        layer(x.repeat(2, 1, 1), cp_context=context)
    with pytest.raises(ValueError, match="leave padding out"):
        layer(x, attention_mask=torch.ones(1, 5), cp_context=context)
    given = {"past_key_values": cache} if adaptive else {}
    with pytest.raises(ValueError, match="one sequence; it has 2"):
        layer(x, use_cache=True, cp_context=context, **given)
    with torch.no_grad():
        layer(x, past_key_values=cache, use_cache=True)
    context.cu_seqlens_cpu = context.cu_seqlens_cpu[::2]
    with pytest.raises(ValueError, match="omit past_key_values"):
        layer(x, past_key_values=cache, cp_context=context)


@pytest.mark.parametrize("checkpoint_above", [None, 10])
def test_blocks_of_all_mixers(checkpoint_above):
    options = {"block": True, "checkpoint_above": checkpoint_above}
    cases = [make_case(LENGTHS[3], bounds, **options) for bounds in ([0, 100], [0, 36, 40, 100])]
    assert_equal(cases, run_ranks(3, run_layers, cases))


def test_shards_are_reset_and_marked():
    def make():
        return HybridBlock(WIDTH, 2)

    names = {n for n, _ in make().named_parameters() if n.split(".")[-1] in UNDECAYED}
    for values, marked in run_ranks(2, reset_shards, WIDTH):
        assert marked == names
        assert_drawn_alike(values, make)
