"""One sequence over several GPUs: the operator and the layer, against one GPU.

    PYTORCH_ALLOC_CONF=expandable_segments:True \
        torchrun --nproc_per_node 2 -m benchmarks parallel --out benchmarks/h200x2/parallel.json

Each process drives one GPU and holds a slice of the sequence. A run with one process measures one
GPU alone, with the code of several ranks and an exchange with itself. Without the environment
variable, fragmentation keeps the second step of the longest call from allocating its 116 GB.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from itertools import chain
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine import clocks
from benchmarks.engine import inputs as made
from benchmarks.engine.clocks import free, soak
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Run, start
from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, relative_rms

mount()

MILLION = 1_000_000
CHECKED = 131_072
"""Tokens of the comparison with float64."""
STRAINED = (
    *((CHECKED, kind) for kind in ("layer-like", "slow heads")),
    *((8 * CHECKED, kind) for kind in ("bursts", "slow heads")),
)
"""The comparisons: the number of tokens over all ranks, and the kind of inputs."""
REPEATS = 7
LONG = 8 << 20
"""Tokens of a GPU in the longest call."""

ALIKE = {"forward_ms": 1.10, "training_ms": 1.12}
"""Longest accepted time of two GPUs with a million tokens each, over one GPU's for its million."""
FASTER = 1.75
"""Least accepted speed-up of a million tokens in all on two GPUs."""
ERROR = 6e-3
"""Largest accepted error of outputs and of q's, k's and v's gradients."""

PROTOCOL = """\
B = 1, H = 8, S = 64, bf16, inputs as a layer with default weights makes them. Every rank times \
the same number of calls in a row (operator 32, layer and gated rule 8) by events on its GPU, \
after a barrier; the slowest rank counts; median of 7. One GPU: the same call without a context, \
on every GPU at once. Training is the forward and the backward pass, gradients of all inputs. \
Errors compare the outputs of all ranks with one GPU's, and with float64."""


def events_ms(call: Callable[[], object], times: int = 1) -> float:
    """Return the mean milliseconds of several calls by events on this GPU, after a barrier."""
    torch.cuda.synchronize()
    dist.barrier()
    return clocks.events_ms([call], times)


def together_ms(call: Callable[[], object], times: int) -> float:
    """Return the median time of one call on the slowest rank; every rank calls equally often."""
    for _ in range(3):
        call()
    slowest = torch.tensor([events_ms(call, times) for _ in range(REPEATS)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(median(slowest.tolist()))


def context_of(tokens: int, taps: int | None = None) -> Any:
    """Return the context of one sequence with about `tokens` on each rank, in whole tiles."""
    from fla.ops.quasar.parallel.context import build_cp_context

    world = dist.get_world_size()
    lengths = [-(-tokens // 64) * 64] * (world - 1)
    lengths.append(tokens * world - sum(lengths))
    bounds = torch.tensor([0, tokens * world], device="cuda")
    return build_cp_context(bounds, dist.group.WORLD, taps, bounds.cpu(), lengths=lengths)


def own_tokens(tokens: int, context: Any) -> int:
    return tokens if context is None else int(context.lengths[dist.get_rank()])


def both_ways(
    function: Callable[..., Any], leaves: Sequence[Tensor], context: Any
) -> Mapping[str, Callable[[], object]]:
    """Return calls of an operator: a forward pass, and one with its backward pass."""
    do = torch.randn_like(leaves[2])

    def forward() -> None:
        with torch.no_grad():
            function(*leaves, cp_context=context)

    def training() -> None:
        o, _ = function(*leaves, cp_context=context)
        torch.autograd.grad(o, leaves, do)

    return {"forward": forward, "training": training}


def calls(tokens: int, context: Any) -> Mapping[str, Callable[[], object]]:
    """Return the operator's calls over `tokens` tokens on this rank."""
    from fla.ops.quasar import chunk_quasar

    leaves = [y.requires_grad_() for y in made.layer_like(own_tokens(tokens, context))]
    return both_ways(chunk_quasar, leaves, context)


def measure_operator() -> Iterator[Entry]:
    yield from times("operator", lambda n, alone: calls(n, None if alone else context_of(n)), 32)


def times(
    table: str, made_for: Callable[[int, bool], Mapping[str, Callable[[], Any]]], repeats: int
) -> Iterator[Entry]:
    """Time calls on one GPU and on all GPUs.

    `made_for(tokens, alone)` returns the calls for `tokens` per GPU; `alone` is whether only one of
    several GPUs computes.
    """
    world = dist.get_world_size()
    for tokens, gpus in ((MILLION, 1), (MILLION, world), (MILLION // world, world)):
        timed = made_for(tokens, gpus == 1 < world)
        figures = {f"{name}_ms": together_ms(call, repeats) for name, call in timed.items()}
        of = {"tokens_per_gpu": tokens, "gpus": gpus}
        yield Entry(table=table, of=of, by="cuda", figures=figures)
        del timed
        free()


def strained(kind: str, tokens: int) -> Any:
    """Return inputs of a kind: like a layer's, with bursts, or with heads that forget slowly."""
    if kind == "layer-like":
        return made.layer_like(tokens)
    q, k, v, beta = made.forgetting(tokens, 2 if kind == "slow heads" else 0)
    if kind == "bursts":
        for n in range(20):
            at = n * tokens // 20 + tokens // 23
            v[:, at : at + 10] *= 1000 + 1500 * n
    return q, k, v, beta


def by_windows(x: Tensor) -> Tensor:
    """Return the norms `[windows, H]` of x `[1, T, H, S]` over windows of 512 tokens."""
    norms: Tensor = x.reshape(-1, 512, *x.shape[2:]).norm(dim=(1, 3))
    return norms


def measure_equality() -> Iterator[Entry]:
    """Compare the joined results of all ranks with one GPU's and with float64."""
    for tokens, kind in STRAINED:
        torch.manual_seed(1)
        errors, same = differences(strained(kind, tokens), tokens // dist.get_world_size())
        worst = torch.tensor([*errors.values(), float(not same)], device="cuda").double()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        *values, differs = worst.tolist()
        yield Entry(
            table="equality",
            of={"tokens": tokens, "inputs": kind},
            by="cuda",
            errors=dict(zip(errors, values, strict=True)),
            figures={"same_again": not differs},
        )
        free()


def differences(x: Sequence[Tensor], share: int) -> tuple[dict[str, float], bool]:
    """Return the errors of this rank's `share` tokens of inputs, and whether two calls agree."""
    from fla.ops.quasar import chunk_quasar

    at = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    do = torch.randn_like(x[0])
    whole = [y.clone().requires_grad_() for y in x]
    own = [(y[:, at] if y.ndim > 1 else y).clone().requires_grad_() for y in x]
    one, _ = chunk_quasar(*whole)
    one_grads = torch.autograd.grad(one, whole, do)
    results = []
    for _ in range(2):
        o, _ = chunk_quasar(*own, cp_context=context_of(share))
        results.append((o, *torch.autograd.grad(o, own, do[:, at])))
        dist.all_reduce(results[-1][4])
    (o, *grads), again = results
    exact = quasar_chunked(*x, chunk=128)[0][:, at]
    windows = by_windows(o.double() - exact) / by_windows(exact)
    errors = {
        "o, one GPU": relative_rms(o, one[:, at]),
        "o, float64": relative_rms(o, exact),
        "o of one GPU, float64": relative_rms(one[:, at], exact),
        "worst window, float64": float(windows.max()),
    }
    for name, a, b in zip(("dq", "dk", "dv", "dbeta"), grads, one_grads, strict=True):
        errors[name] = relative_rms(a, b[:, at] if b.ndim > 1 else b)
    return errors, all(torch.equal(a, b) for a, b in zip((o, *grads), again, strict=True))


def measure_terms() -> Iterator[Entry]:
    """Time the fold of the maps of eight ranks, and count the bytes that ranks exchange."""
    from fla.ops.quasar.operator_types import ScanInputs
    from fla.ops.quasar.parallel import chunks
    from fla.ops.quasar.parallel.context import place_of

    place = place_of(context_of(MILLION), MILLION)
    x = ScanInputs.of(*made.layer_like(MILLION))
    last = chunks.start_forward(place._replace(rank=7, before=7), x, True, "auto")
    own = last.compute_map()
    eight = own.repeat(8, 1)

    figures = {
        "fold_of_8_ms": together_ms(lambda: last.enter(eight), 50),
        "exchanged_bytes": own.numel() * 4,
    }
    yield Entry(table="terms", of={"tokens_per_gpu": MILLION}, by="cuda", figures=figures)


def layer_calls(tokens: int, context: Any) -> Mapping[str, Callable[[], Any]]:
    """Return the layer's forward pass, and one with its backward pass, as `calls`."""
    from fla.layers.quasar import QuasarAttention

    torch.manual_seed(2)
    layer = QuasarAttention(512, head_dim=64, num_heads=8).cuda()
    x = torch.randn(1, own_tokens(tokens, context), 512, device="cuda", requires_grad=True)

    def forward() -> Any:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            return layer(x, cp_context=context)[0]

    def training() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x, cp_context=context)[0]
        y.backward(y.detach())
        x.grad = None
        return layer

    return {"forward": forward, "training": training}


def measure_layer() -> Iterator[Entry]:
    yield from times(
        "layer", lambda n, alone: layer_calls(n, None if alone else context_of(n, 4)), 8
    )


def measure_long() -> Iterator[Entry]:
    """Measure time and memory of one training step of the layer with very many tokens on each GPU.

    Before that, one GPU alone computes a step with half as many tokens.
    """
    world = dist.get_world_size()
    for own, gpus in ((LONG // 2, 1), (LONG, world)):
        context = context_of(own, 4) if gpus == world else None
        call = layer_calls(own, context)["training"]
        for _ in range(2):  # the second allocates no memory
            call()
        torch.cuda.reset_peak_memory_stats()
        figures = {
            "training_ms": events_ms(call),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
        yield Entry(
            table="long", of={"tokens_per_gpu": own, "gpus": gpus}, by="cuda", figures=figures
        )
        del call
        free()


def measure_fla() -> Iterator[Entry]:
    """Time fla's gated delta rule and this project's, on one GPU and on all."""
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as by_fla

    from quasar_kernels.delta_rule import chunk_gated_delta_rule as by_cuda

    world, tokens = dist.get_world_size(), 262_144
    bounds = torch.tensor([0, tokens * world], device="cuda")
    group: Any = dist.group.WORLD
    context = build_cp_context(bounds, group, cu_seqlens_cpu=bounds.cpu())
    q, k, v, _ = made.layer_like(tokens)
    k = F.normalize(k.float(), dim=-1).bfloat16()
    beta, g = torch.rand(2, 1, tokens, made.HEADS, device="cuda").unbind()
    leaves = [y.requires_grad_() for y in (q, k, v, -0.05 * g, beta)]
    for by, function in (("fla", by_fla), ("cuda", by_cuda)):
        for gpus, cp in ((1, None), (world, context)):
            for name, call in both_ways(function, leaves, cp).items():
                of = {"pass": name, "tokens_per_gpu": tokens, "gpus": gpus}
                try:
                    figures = {"ms": together_ms(call, 8)}
                except RuntimeError as error:  # on all ranks, for some versions of Triton
                    yield Entry(table="gated", of=of, by=by, failure=str(error))
                else:
                    yield Entry(table="gated", of=of, by=by, figures=figures)


PARTS = (
    measure_equality,
    measure_operator,
    measure_layer,
    measure_terms,
    measure_long,
    measure_fla,  # last, as Triton compiles many variants of its kernels first
)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """Run the parts; only the first rank writes the file."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl", timeout=timedelta(minutes=10))
    if dist.get_rank():
        args.out = None
    torch.manual_seed(0)
    run = start(
        "parallel", PROTOCOL, args.commit, versions={"fla-core": metadata.version("fla-core")}
    )
    run = run.adding(gpus=dist.get_world_size())
    soak(0.5)
    yield from run.growing(chain.from_iterable(part() for part in PARTS))
    dist.destroy_process_group()


def figures_of(run: Run, table: str) -> tuple[Entry, Entry, Entry]:
    """Return the entries of one GPU, of a million tokens on each, and of a million in all."""
    entries = run.table(table)
    one = next(entry for entry in entries if entry.of["gpus"] == 1)
    each, shared = (entry for entry in entries if entry.of["gpus"] != 1)
    return one, each, shared


def limits(run: Run) -> Iterator[Criterion]:
    for table in ("operator", "layer"):
        if not run.table(table):
            continue
        one, each, shared = (entry.figures for entry in figures_of(run, table))
        for name, most in ALIKE.items():
            what = f"{table}, {name.removesuffix('_ms')}"
            yield Criterion(
                f"{what}, a million tokens a GPU, over one", each[name] / one[name], most
            )
            text = f"{what}, a million tokens in all, times as fast as one"
            yield Criterion(text, one[name] / shared[name], FASTER, True)
    for entry in run.table("equality"):
        for name in ("o, float64", "dq", "dk", "dv"):
            text = f"{name}, {entry.of['inputs']}, {entry.of['tokens']:,} tokens"
            yield Criterion(text, entry.errors[name], ERROR)
