"""The portable fused stages: their grids, and their kernels run on a CPU against float64."""

from itertools import pairwise

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.layer import portable
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.first_tokens import project_rows
from fla.ops.quasar.layer.wrapped import plain_weights

from quasar_kernels.reference import quasar_layer, quasar_recurrence, relative_rms
from tests.quasar_kernels.cuda.emulated.programs import EMULATED
from tests.quasar_kernels.layer.fused_stages import (
    EPS,
    apart,
    check_projection,
    exact_output,
    exact_projection,
    gated_output,
    output_inputs,
    project,
    projection_weights,
)
from tests.quasar_kernels.tolerances import GATED_OUTPUT

pytestmark = EMULATED
BF16, FP16 = torch.bfloat16, torch.float16
calls = pytest.mark.parametrize(
    ("tokens", "blocks", "late", "groups", "dtype"),
    [
        (1, 108, False, 1, FP16),
        (130, 108, True, 2, BF16),
        (300, 1, False, 1, BF16),
        (300, 1, True, 2, FP16),
        (517, 2, True, 1, BF16),
    ],
)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("most", [1, 28, 82, 264])
@pytest.mark.parametrize("tokens", [1, 3, 4, 128, 129, 253, 512, 16_384, 100_000, 1_000_000])
def test_the_grids_hold_every_token_and_every_product_at_once(tokens, most, groups):
    blocks, rows, steps = portable.projection_grid(tokens, most, groups)
    assert 1 <= rows <= 25
    assert blocks * rows <= most
    assert blocks * (128 * steps - 3) + 3 >= tokens
    assert (blocks - 1) * (128 * steps - 3) + 3 < max(tokens, 4)  # no block is idle
    blocks, rows, steps = portable.output_grid(tokens, 8, most, groups)
    assert 1 <= rows <= 8
    assert blocks * rows <= most
    assert 128 * blocks * steps >= tokens
    if tokens == 1_000_000:
        assert rows == portable.projection_grid(tokens, most, groups)[1] == 1  # x is read once


def load(programs, dtype, blocks, late, groups):
    """The kernels with so many groups of warps in a block, of which so many run at once."""
    program = programs.load(portable.PROGRAM, dtype, (f"-DQUASAR_GROUPS={groups}",), late)
    kernels = {name: kernel._replace(blocks=1) for name, kernel in program.kernels.items()}
    return program._replace(multiprocessors=blocks, kernels=kernels)


@calls
def test_the_projection_matches_float64(programs, tokens, blocks, late, groups, dtype):
    program = load(programs, dtype, blocks, late, groups)
    x, parts = torch.randn(tokens, 512), projection_weights()
    found = project(portable, program, x, *parts, dtype)
    check_projection(found, exact_projection(x, *parts, dtype), dtype)


@calls
def test_the_gated_output_matches_float64(programs, tokens, blocks, late, groups, dtype):
    program = load(programs, dtype, blocks, late, groups)
    o, narrow, *rest = output_inputs(tokens, dtype, outputs=384)
    y = gated_output(portable, program, o, apart(narrow), *rest)
    assert y.shape == (tokens, 384)
    assert relative_rms(y, exact_output(o, narrow, *rest)) <= GATED_OUTPUT[dtype]


def replace_first_tokens(x, weights, bounds, count, qkv):
    """Stands in for the Triton kernel of this name, which no CPU runs next to the emulated ones."""
    call = Call(8, 64, EPS, qkv.dtype, bounds, "cuda")
    ends = range(0, len(x) + 1, len(x) // count) if bounds is None else bounds.tolist()
    for first, end in pairwise(ends):
        few = slice(first, min(first + 3, end))
        if end > first:
            qkv[few] = project_rows(call, x[few], weights)


@pytest.mark.parametrize(
    ("rows", "tokens", "bounds", "dtype"),
    [
        (1, 140, None, torch.float32),
        (3, 45, None, torch.float32),
        (1, 137, [0, 0, 70, 71, 73, 73, 137, 137], BF16),
    ],
)
def test_the_stages_around_the_operator_give_the_layer(
    programs, monkeypatch, rows, tokens, bounds, dtype
):
    program = load(programs, BF16, 2, late=True, groups=1)
    monkeypatch.setattr(portable, "replace_first_tokens", replace_first_tokens)
    layer = QuasarAttention(hidden_size=512, head_dim=64, num_heads=8)
    x, ends = torch.randn(rows, tokens, 512).to(dtype), bounds and torch.tensor(bounds)
    call = Call(8, 64, layer.norm_eps, BF16, ends, "cuda")
    lengths = [tokens] * rows if bounds is None else ends.diff().tolist()

    def sequences(t):
        return [part.unsqueeze(0) for part in t.flatten(0, 1).split(lengths) if len(part)]

    with torch.no_grad():
        p = portable.project(program, call, x, plain_weights(layer), False, False)
        q, k, v = p.qkv.view(rows, tokens, 3, 8, 64).unbind(2)
        each = zip(sequences(q), sequences(k), sequences(v), strict=True)
        o = [quasar_recurrence(*one, p.beta)[0][0] for one in each]
        y = portable.output(program, call, torch.cat(o).bfloat16(), p, x.shape).flatten(0, 1)
        expected = [
            quasar_layer(layer.state_dict(), one.float(), num_heads=8, head_dim=64)[0]
            for one in sequences(x)
        ]
    wanted = torch.cat(expected)
    assert relative_rms(y, wanted) <= 1.2e-2
    # no token of a sequence's start has those of another sequence in it
    wrong = (y.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert wrong.max() <= 5e-2
