"""KDA's CUDA kernel, emulated on a CPU: all that a chunk needs, against the definitions."""

from __future__ import annotations

import pytest
import torch

from quasar_kernels.delta_rule.kda_cuda.launch import PROGRAM, TOKENS, arguments_of, variant_for
from quasar_kernels.delta_rule.kda_triton.launch import Chunks, plan_call
from tests.quasar_kernels.cuda.emulated.programs import EMULATED
from tests.quasar_kernels.delta_rule.calls import inputs
from tests.quasar_kernels.float64 import check
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import OPERATOR

pytestmark = EMULATED

BF16, FP16 = torch.bfloat16, torch.float16
SCALE = 0.25


def drawn(T, dtype, **options):
    """Draw inputs; every fourth channel has strong, weak and infinite decays next to each other."""
    x = inputs(T, channels=True, dtype=dtype, **options)
    mixed = x.g[..., ::4]
    kinds = torch.tensor([-110.0, -1e-3, 0.0, -1.0, -30.0, -0.1, -0.01, -float("inf")])
    mixed[:] = kinds[torch.randint(len(kinds), mixed.shape)]
    return x


def run(programs, x, bounds=None, segments=1, late=False, training=True):
    """Return the kernel's results for inputs x, all elements NaN beforehand."""
    B, T, H, S = x.v.shape
    plan = plan_call(x.v, bounds, SCALE, segments).plan
    like = [torch.full((B, T, H, n), float("nan"), dtype=x.v.dtype) for n in (*[S] * 4, *[64] * 2)]
    decays = torch.full((B * T // TOKENS + plan.total + 1, H, S), float("nan"))
    chunks = Chunks(*like[:5], like[5] if training else None, decays)
    variant = variant_for(0, x.v.dtype, S)
    program = programs.load(PROGRAM, x.v.dtype, variant.options, late)
    blocks, arguments = arguments_of(plan, (x.q, x.k, x.v, x.g, x.beta), chunks, SCALE)
    program.kernels["kda_chunk"].launch((blocks, 1), arguments)
    return plan, chunks


def exact(x, b, start, stop, head):
    """Compute a chunk's results in float64 from the definitions in forward.py."""
    group = x.v.shape[2] // x.q.shape[2]
    q, k = (y[b, start:stop, head // group].double() for y in (x.q, x.k))
    v, g, beta = (y[b, start:stop, head].double() for y in (x.v, x.g, x.beta))
    n = stop - start
    after = torch.arange(n)[:, None, None] < torch.arange(n)[None, None, :]  # [j, 1, s]: s > j
    until = torch.arange(n)[None, :, None] >= torch.arange(n)[None, None, :]  # [1, i, s]: s <= i
    between = torch.where((after & until)[..., None], g, 0.0).sum(2).exp()  # [j, i, S]
    kk = torch.einsum("is,js,jis->ij", k, k, between)
    P = SCALE * torch.einsum("is,js,jis->ij", q, k, between).tril()
    A = (torch.eye(n) + (beta[:, None] * kk).tril(-1)).inverse()
    since = torch.where(until[0][..., None], g, 0.0).sum(1).exp()
    W, U = ((A * beta) @ y for y in (k * since, v))
    writes, queries = k * torch.where(after[:, 0, :, None], g, 0.0).sum(1).exp(), q * since
    wide = torch.zeros(2, n, TOKENS, dtype=torch.float64)
    wide[:, :, :n] = torch.stack([P, A])
    return Chunks(W, U, writes, SCALE * queries, *wide, g.sum(0).exp())


def compare(x, plan, chunks):
    """Compare each kind of result over all chunks and heads with float64."""
    B, T, H, _ = x.v.shape
    pairs = {name: ([], []) for name, y in chunks._asdict().items() if y is not None}
    segments = [(b, b * plan.per_sequence + n, n * plan.length, min((n + 1) * plan.length, T))
                for b in range(B) for n in range(plan.per_sequence)]  # fmt: skip
    if plan.table is not None:
        table = plan.table.tolist()
        segments = [(0, s, t, t + length) for s, (_, t, length, _) in enumerate(table)]
    for b, s, begin, end in segments:
        for n, start in enumerate(range(begin, end, TOKENS)):
            stop = min(start + TOKENS, end)
            for head in range(H):
                wanted = exact(x, b, start, stop, head)
                for name, (found, expected) in pairs.items():
                    one = getattr(chunks, name)
                    place = (b * T + begin) // TOKENS + s + n, head
                    if name != "decays":
                        place = b, slice(start, stop), head
                    found.append(one[place].flatten())
                    expected.append(getattr(wanted, name).flatten())
    check([torch.cat(found) for found, _ in pairs.values()],
          [torch.cat(expected) for _, expected in pairs.values()], OPERATOR[x.v.dtype])  # fmt: skip


@pytest.mark.parametrize(
    ("T", "dtype", "shape", "segments", "late"),
    [
        (130, BF16, {"K": 128, "H": 1}, 2, False),
        (33, FP16, {"K": 64, "H": 1, "group": 2, "B": 2}, 1, True),
    ],
    ids=str,
)
def test_results(programs, T, dtype, shape, segments, late):
    x = drawn(T, dtype, **shape)
    compare(x, *run(programs, x, None, segments, late))


def test_packed_sequences_without_the_inverse(programs):
    x, bounds = drawn(90, BF16, K=128, H=1), packed([0, 1, 0, 70, 19])
    compare(x, *run(programs, x, bounds, late=True, training=False))


def test_the_past_does_not_depend_on_the_future(programs):
    x = drawn(64, FP16, K=64, H=1)
    later = type(x)(*(torch.cat([y[:, :40], y[:, 40:].flip(1)], 1) for y in x))
    (_, one), (_, other) = run(programs, x), run(programs, later)
    for name in ("reads", "values", "queries", "scores", "inverse"):
        assert torch.equal(getattr(one, name)[:, :40], getattr(other, name)[:, :40]), name
