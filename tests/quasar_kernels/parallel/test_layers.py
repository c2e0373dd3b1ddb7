"""The layer over several processes: outputs and all gradients are those of one process."""

from __future__ import annotations

import pytest
import torch

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.parallel.layers import (
    WIDTH,
    Case,
    make_block,
    make_layer,
    run_blocks,
    run_layers,
    run_prefill,
)
from tests.quasar_kernels.parallel.processes import run_ranks
from tests.quasar_kernels.tolerances import LAYER_GRADIENT

pytestmark = pytest.mark.slow

LENGTHS = {2: [37, 63], 3: [35, 2, 63]}
LIMIT = LAYER_GRADIENT[torch.float32]


def case(lengths, bounds, **more):
    x, dy = torch.randn(2, 1, sum(lengths), WIDTH).unbind()
    return Case(x, dy, bounds, lengths, **more)


def expected(given):
    """What one process gives."""
    layer, x = make_layer(given.conv), given.x.clone().requires_grad_()
    y = 2 * layer(x, cu_seqlens=torch.tensor(given.bounds))[0]
    (y * given.dy).sum().backward()
    return {"y": y, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_equal(cases, ranks):
    for n, given in enumerate(cases):
        wanted = expected(given)
        for name, exact in wanted.items():
            own = [rank[n][name] for rank in ranks]
            found = torch.cat(own, 1) if name in "yx" else own[0]
            assert relative_rms(found, exact) <= LIMIT, (given.bounds, given.wrapped, name)


@pytest.mark.parametrize("world", LENGTHS)
def test_outputs_and_gradients(world):
    lengths = LENGTHS[world]
    cases = [
        case(lengths, [0, 100]),
        case(lengths, [0, 36, 40, 100]),  # within the first tokens of a slice
        case(lengths, [0, 100], conv=False),
    ]
    assert_equal(cases, run_ranks(world, run_layers, cases))


def test_with_ddp_fsdp_checkpointing_and_compilation():
    kinds = ("ddp", "fsdp", "checkpoint", "compile")
    cases = [case(LENGTHS[2], [0, 40, 100], wrapped=kind) for kind in kinds]
    assert_equal(cases, run_ranks(2, run_layers, cases))


def test_decoding_goes_on_from_the_last_rank_s_cache():
    x, token = torch.randn(1, 100, WIDTH), torch.randn(1, 1, WIDTH)
    y = run_ranks(3, run_prefill, x, LENGTHS[3], token)[-1]
    with torch.no_grad():
        whole = make_layer()(torch.cat([x, token], 1))[0]
    assert relative_rms(y, whole[:, -1:]) <= LIMIT


def test_what_a_slice_does_not_take():
    layer, x = make_layer(), torch.randn(1, 5, WIDTH)
    context = type("Context", (), {"cu_seqlens_cpu": torch.tensor([0, 2, 5])})()
    with pytest.raises(ValueError, match="leave padding out"):
        layer(x, attention_mask=torch.ones(1, 5), cp_context=context)
    with pytest.raises(ValueError, match="got 2 sequences"):
        layer(x, use_cache=True, cp_context=context)


@pytest.mark.parametrize("above", [None, 10])
def test_blocks_of_all_mixers(above):
    cases = [case(LENGTHS[3], [0, 100]), case(LENGTHS[3], [0, 36, 40, 100])]
    ranks = run_ranks(3, run_blocks, cases, above)
    for n, given in enumerate(cases):
        block, x = make_block(), given.x.clone().requires_grad_()
        y, _ = block(x, cu_seqlens=torch.tensor(given.bounds))
        (y * given.dy).sum().backward()
        wanted = {"y": y, "x": x.grad, **{name: p.grad for name, p in block.named_parameters()}}
        for name, exact in wanted.items():
            own = [rank[n][name] for rank in ranks]
            found = torch.cat(own, 1) if name in "yx" else own[0]
            assert relative_rms(found, exact) <= LIMIT, (given.bounds, name)
