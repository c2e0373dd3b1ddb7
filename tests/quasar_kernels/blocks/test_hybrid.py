"""HybridBlock: fusion, decoding, packed sequences, recomputation, and errors."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from quasar_kernels.blocks import MIXERS, HybridBlock
from quasar_kernels.blocks.fusion import FUSIONS
from tests.quasar_kernels.float64 import check
from tests.quasar_kernels.inputs import packed

WIDTH, HEADS = 32, 2


def make_block(mixers=MIXERS, fusion="gains", **options):
    """Return a block in float64 with random parameters."""
    block = HybridBlock(WIDTH, HEADS, mixers, fusion, 1, 3, state=16, **options).double()
    for p in block.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return block


def tokens(T, B=2):
    return torch.randn(B, T, WIDTH, dtype=torch.float64)


def test_prefill_and_single_steps_equal_one_call():
    block, x = make_block(), tokens(30)
    whole, nothing = block(x)
    assert nothing is None
    with torch.no_grad():
        y, state = block(x[:, :26], keep=True)
        parts = [y]
        for t in range(26, 30):
            y, state = block(x[:, t : t + 1], state, keep=True)
            parts.append(y)
    check([torch.cat(parts, 1)], [whole], 1e-9)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_fusion_of_the_branches(fusion):
    block, x = make_block(fusion=fusion), tokens(20)
    normed = F.rms_norm(x, (WIDTH,), block.norm.weight, torch.finfo(x.dtype).eps)
    y = [mixer(normed)[0] for mixer in block.mixers.values()]
    if fusion == "gains":
        mixed = sum(g * b for g, b in zip(block.fusion.gains, y, strict=True))
    elif fusion == "gated":
        logits = F.linear(normed, block.fusion.gate.weight, block.fusion.gate.bias)
        shares = logits.view(2, 20, 3, HEADS).softmax(2).repeat_interleave(WIDTH // HEADS, 3)
        mixed = sum(shares[:, :, n] * b for n, b in enumerate(y))
    else:
        scaled = [
            b / b.square().mean(-1, keepdim=True).sqrt() * norm.weight
            for b, norm in zip(y, block.fusion.norms, strict=True)
        ]
        mixed = sum(scaled) / 3
    x = x + mixed
    check(
        [block(x - mixed)[0]],
        [x + block.mlp(block.mlp_norm(x))],
        1e-6 if fusion == "gated" else 1e-9,
    )


@pytest.mark.parametrize("width", [32, 256])
def test_branches_are_initially_about_equally_large(width):
    block, x = HybridBlock(width, 4, state=16), torch.randn(4, 64, width)
    sizes = [float(mixer(x)[0].detach().square().mean().sqrt()) for mixer in block.mixers.values()]
    assert max(sizes) / min(sizes) < 1.3
    assert min(sizes) > 0.2


def test_packed_sequences_equal_separate_ones():
    block, x = make_block(), tokens(31, 1)
    parts = [block(part)[0] for part in x.split([13, 18], 1)]
    check([block(x, cu_seqlens=packed([13, 0, 18]))[0]], [torch.cat(parts, 1)], 1e-9)


def test_recomputation_gives_the_same_gradients_and_stores_less():
    block, x = make_block(), tokens(40)
    kept, found = [], []
    for limit in (None, 39, 40):
        block.checkpoint_above, sizes = limit, []
        block.zero_grad()
        pack = partial(lambda sizes, y: sizes.append(y.numel()) or y, sizes)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            loss = block(x)[0].square().sum()
        kept.append(sum(sizes))
        loss.backward()
        found.append([p.grad.clone() for p in block.parameters()])
    assert kept[1] < kept[0] / 10
    assert kept[2] == kept[0]
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))


@pytest.mark.slow
def test_compilation_traces_no_loop_over_chunks():
    block, counts = make_block(), []

    def compile_nothing(graph, _inputs):
        counts[-1] += len(graph.graph.nodes)
        return graph.forward

    for T in (70, 140):  # two chunks and three
        x = tokens(T, 1)
        counts.append(0)
        torch.compiler.reset()
        y, _ = torch.compile(block, backend=compile_nothing, dynamic=False)(x)
        check([y], [block(x)[0]], 1e-12)
    assert 0 < counts[0] == counts[1], counts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixers": ("rwkv7",)}, "some of rwkv6, mamba2, quasar, each once"),
        ({"mixers": ()}, "each once"),
        ({"mixers": "rwkv6+rwkv6"}, r"each once; got \['rwkv6', 'rwkv6'\]"),
        ({"fusion": "sum"}, "one of gains, gated, mean; got 'sum'"),
        ({"mixers": ("quasar",), "heads": 5}, "got 32 and 5"),
        ({"heads": 0}, "heads must be a whole number from 1; got 0"),
        ({"width": 32.0}, "width must be a whole number from 1; got 32.0"),
        ({"inner": 0}, "inner must be a whole number from 1; got 0"),
    ],
)
def test_invalid_options(options, words):
    with pytest.raises(ValueError, match=words):
        HybridBlock(**({"width": WIDTH, "heads": HEADS} | options))


@pytest.mark.parametrize("mixers", [*((name,) for name in MIXERS), MIXERS])
def test_invalid_inputs(mixers):
    block = make_block(mixers=mixers)
    x = tokens(5)
    _, state = block(x, keep=True)
    for arguments, words in (
        ((x[0],), r"x must have shape \[B, T, 32\]; got \[5, 32\]"),
        ((x[..., 1:],), r"x must have shape \[B, T, 32\]; got \[2, 5, 31\]"),
        ((x.long(),), "x must be bf16, fp16, fp32 or fp64; got torch.int64"),
        ((None,), "got NoneType"),
        ((tokens(5, B=3), state), "must have shape .* got"),
        ((x, {}), "state must come from a block of"),
        ((x, None, torch.tensor([0, 5])), "B must be 1; got B = 2"),
        ((x[:1], None, [0, 5]), "cu_seqlens must be an int32 or int64 tensor"),
        ((x[:1], None, torch.tensor([0, 4])), "must rise from 0 to T = 5"),
    ):
        with pytest.raises(ValueError, match=words):
            block(*arguments)


def test_an_empty_batch():
    block = make_block()
    x = tokens(5, B=0).requires_grad_()
    y, state = block(x, keep=True)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    for parameter in block.parameters():  # DistributedDataParallel waits for each of them
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    assert block(x[:, :1], state)[0].shape == (0, 1, WIDTH)
