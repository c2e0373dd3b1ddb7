"""One sequence over several GPUs: the operator, the layer and the gated rule, against one GPU.

    PYTORCH_ALLOC_CONF=expandable_segments:True \
        torchrun --nproc_per_node 4 -m benchmarks parallel --out benchmarks/h200x4/parallel.json

Each process drives one GPU and holds a slice of the sequence. With four processes, groups of two
and of four are timed. The environment variable prevents fragmentation, because of which the second
step of the longest call would run out of memory.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
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
REPEATS = 5
LONG_BYTES = 16_000
"""Memory of a token in the longest call, which takes as many million tokens as fit."""

ALIKE = {"forward": 1.10, "training": 1.12}
"""Longest accepted time of several GPUs with a million tokens each, over one GPU's."""
FASTER = {
    2: {"forward": 1.75, "training": 1.75},
    4: {"forward": 3.2, "training": 3.6},
}
"""Least accepted speed-up of the layer's million tokens, by the number of GPUs that share them."""
ERROR = 6e-3
"""Largest accepted error of outputs and of q's, k's and v's gradients."""

PROTOCOL = """\
B = 1, H = 8, S = 64, bf16, inputs as a layer with default weights makes them. Every rank times \
the same number of calls in a row (operator 32, layer and gated rule 8) by events on its GPU, \
after a barrier; the slowest rank counts; median of 5. The host's time is that of its launches of \
as many forward passes, without a wait for the GPU. Replayed: a CUDA graph of that pass with its \
exchange. One GPU: the same call without a context, on every GPU at once; groups of fewer GPUs \
than all also run at the same time. Training is the forward and the backward pass, gradients of \
all inputs. Errors compare the outputs of all ranks with one GPU's, and with float64."""


def events_ms(call: Callable[[], object], times: int = 1) -> float:
    """Return the mean milliseconds of several calls by events on this GPU, after a barrier."""
    torch.cuda.synchronize()
    dist.barrier()
    return clocks.events_ms([call], times)


def slowest(samples: Sequence[float]) -> float:
    """Return the median over the samples; of each sample the slowest rank's value counts."""
    values = torch.tensor(samples, device="cuda", dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return float(median(values.tolist()))


def together_ms(call: Callable[[], object], times: int) -> float:
    """Return the median time of one call on the slowest rank; every rank calls equally often."""
    for _ in range(3):
        call()
    return slowest([events_ms(call, times) for _ in range(REPEATS)])


def host_ms(call: Callable[[], object], times: int) -> float:
    """Return the median time in which the slowest rank's host launches one call."""
    samples = []
    for _ in range(REPEATS):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        samples.append((time.perf_counter() - began) * 1e3 / times)
    return slowest(samples)


def replayed_ms(call: Callable[[], object], times: int) -> float:
    """Return `together_ms` of replays of a call that is captured with its exchange."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events, which a capture in the mode "global" forbids
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    ms = together_ms(graph.replay, times)
    graph.reset()
    return ms


@functools.cache
def group_of(gpus: int) -> Any:
    """Return this rank's group of `gpus` ranks; all ranks must call it."""
    return dist.new_subgroups(gpus)[0]  # type: ignore[no-untyped-call]


def context_of(tokens: int, group: Any, taps: int | None = None) -> Any:
    """Return the context of one sequence with about `tokens` on each rank, in whole tiles.

    It is None without a group, when one GPU computes alone.
    """
    from fla.ops.quasar.parallel.context import build_cp_context

    if group is None:
        return None
    world = dist.get_world_size(group)
    lengths = [-(-tokens // 64) * 64] * (world - 1)
    lengths.append(tokens * world - sum(lengths))
    bounds = torch.tensor([0, tokens * world], device="cuda")
    return build_cp_context(bounds, group, taps, bounds.cpu(), lengths=lengths)


def own_tokens(tokens: int, context: Any) -> int:
    return tokens if context is None else int(context.lengths[dist.get_rank(context.group)])


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


def operator_calls(tokens: int, group: Any) -> Mapping[str, Callable[[], object]]:
    """Return the operator's calls over `tokens` tokens on each rank of a group."""
    from fla.ops.quasar import chunk_quasar

    context = context_of(tokens, group)
    leaves = [y.requires_grad_() for y in made.layer_like(own_tokens(tokens, context))]
    return both_ways(chunk_quasar, leaves, context)


def gated_calls(tokens: int, group: Any) -> Mapping[str, Callable[[], object]]:
    """Return the calls of the gated delta rule, as `operator_calls`."""
    from quasar_kernels.delta_rule import chunk_gated_delta_rule

    context = context_of(tokens, group)
    q, k, v, _ = made.layer_like(own_tokens(tokens, context))
    k = F.normalize(k.float(), dim=-1).bfloat16()
    beta, g = torch.rand(2, *k.shape[:3], device="cuda").unbind()
    leaves = [y.requires_grad_() for y in (q, k, v, -0.05 * g, beta)]
    return both_ways(chunk_gated_delta_rule, leaves, context)


def layer_calls(tokens: int, group: Any) -> Mapping[str, Callable[[], Any]]:
    """Return the layer's forward pass, and one with its backward pass, as `operator_calls`."""
    from fla.layers.quasar import QuasarAttention

    torch.manual_seed(2)
    context = context_of(tokens, group, 4)
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


def times(table: str, made_for: Callable[[int, Any], Any], repeats: int) -> Iterator[Entry]:
    """Time the calls that `made_for(tokens, group)` returns, on one GPU and on groups of GPUs.

    Each GPU has a million tokens, its share of a million, or a quarter of a million.
    """
    world = dist.get_world_size()
    for gpus in (n for n in range(1, world + 1) if world % n == 0):
        group = None if gpus == 1 else group_of(gpus)
        for tokens in dict.fromkeys((MILLION, MILLION // gpus, MILLION // 4)):
            calls = made_for(tokens, group)
            figures = {f"{name}_ms": together_ms(call, repeats) for name, call in calls.items()}
            figures["host_ms"] = host_ms(calls["forward"], repeats)
            figures["replayed_ms"] = replayed_ms(calls["forward"], repeats)
            of = {"tokens_per_gpu": tokens, "gpus": gpus}
            yield Entry(table=table, of=of, by="cuda", figures=figures)
            del calls
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
        o, _ = chunk_quasar(*own, cp_context=context_of(share, dist.group.WORLD))
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
    """Time how a rank combines the maps of eight ranks, and count the bytes that ranks exchange."""
    from fla.ops.quasar.operator_types import ScanInputs
    from fla.ops.quasar.parallel import chunks
    from fla.ops.quasar.parallel.context import place_of

    place = place_of(context_of(MILLION, dist.group.WORLD), MILLION)
    x = ScanInputs.of(*made.layer_like(MILLION))
    last = chunks.start_forward(place._replace(rank=7, before=7), x, True, "auto")
    own = last.compute_map()
    eight = own.repeat(8, 1)

    figures = {
        "fold_of_8_ms": together_ms(lambda: last.enter(eight), 50),
        "exchanged_bytes": own.numel() * 4,
    }
    yield Entry(table="terms", of={"tokens_per_gpu": MILLION}, by="cuda", figures=figures)


def measure_long() -> Iterator[Entry]:
    """Measure time and memory of one training step of the layer with very many tokens on each GPU.

    Before that, one GPU alone computes a step with half as many tokens.
    """
    world = dist.get_world_size()
    memory = torch.cuda.get_device_properties(0).total_memory
    tokens = memory // LONG_BYTES // MILLION * MILLION
    for own, gpus in ((tokens // 2, 1), (tokens, world)):
        call = layer_calls(own, group_of(gpus) if gpus > 1 else None)["training"]
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


PARTS: tuple[Callable[[], Iterator[Entry]], ...] = (
    lambda: times("layer", layer_calls, 8),
    lambda: times("operator", operator_calls, 32),
    measure_equality,
    measure_terms,
    measure_long,
    lambda: times("gated", gated_calls, 8),
)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """Run the parts; only the first rank writes the file."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl", timeout=timedelta(minutes=10))
    if dist.get_rank():
        args.out = None
    torch.manual_seed(0)
    run = start("parallel", PROTOCOL, args.commit).adding(gpus=dist.get_world_size())
    soak(0.5)
    yield from run.growing(chain.from_iterable(part() for part in PARTS))
    dist.destroy_process_group()


def comparisons(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the milliseconds of each timed call on one GPU and on each number of GPUs.

    `each` is with a million tokens on each GPU, `shared` with a million in all, and `quarter` with
    250,000 on each. `host` and `replayed` are times of the forward pass with 250,000 on each.
    """
    for table in ("layer", "operator", "gated"):
        found = {
            (entry.of["gpus"], entry.of["tokens_per_gpu"]): entry.figures
            for entry in run.table(table)
        }
        for way in ALIKE if found else ():
            for gpus in sorted({int(n) for n, _ in found} - {1}):
                quarter = found[gpus, MILLION // 4]
                yield {
                    "table": table,
                    "way": way,
                    "gpus": gpus,
                    "one": found[1, MILLION][f"{way}_ms"],
                    "each": found[gpus, MILLION][f"{way}_ms"],
                    "shared": found[gpus, MILLION // gpus][f"{way}_ms"],
                    "quarter": quarter[f"{way}_ms"],
                    "host": quarter["host_ms"],
                    "replayed": quarter.get("replayed_ms"),
                }


def limits(run: Run) -> Iterator[Criterion]:
    for row in comparisons(run):
        what = f"{row['table']}, {row['way']}, {row['gpus']} GPUs"
        each = f"{what}, a million tokens each, over one"
        yield Criterion(each, row["each"] / row["one"], ALIKE[row["way"]])
        if row["table"] == "layer" and row["gpus"] in FASTER:
            text = f"{what}, a million tokens in all, times as fast as one"
            least = FASTER[row["gpus"]][row["way"]]
            yield Criterion(text, row["one"] / row["shared"], least, True)
    for entry in run.table("equality"):
        for name in ("o, float64", "dq", "dk", "dv"):
            text = f"{name}, {entry.of['inputs']}, {entry.of['tokens']:,} tokens"
            yield Criterion(text, entry.errors[name], ERROR)
