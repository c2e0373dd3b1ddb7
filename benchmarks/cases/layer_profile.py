"""The time of each kernel in the layer's forward pass on this GPU.

    python -m benchmarks layer_profile --fork PATH --out benchmarks/h200/layer-profile.json

PATH is a checkout of the public fork; --tree selects another tree than the overlay. The time of a
call is measured in the validator's loop without the profiler. The same process measures the
bandwidth of a copy and the rate of a product, from which the document's floors are computed.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from benchmarks.cases import trees
from benchmarks.cases.layer_calls import DEVICE
from benchmarks.engine import clocks
from benchmarks.engine.results import Entry, Run, start
from harness.worker.subject.timing import recording, time_layer
from harness.worker.subject.tree import Loaded
from harness.workload import WORKLOAD

TOKENS = 1_000_000
CALLS = 10
WARMUP_CALLS = 10
NAME_LENGTH = 300
"""Characters kept of a kernel's name; templates make some of them longer."""


def launches_of(calls: Sequence[Sequence[tuple[str, float, float]]]) -> list[Entry]:
    """Return the median time of each launch over calls that launch the same kernels.

    Args:
        calls: the (name, start, milliseconds) of each launch of each call.

    Raises:
        SystemExit: the calls do not launch the same kernels.
    """
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for call in calls:
        seen: dict[str, int] = defaultdict(int)
        first = min(began for _, began, _ in call)
        for name, began, ms in sorted(call, key=lambda launch: launch[1]):
            spans[name, seen[name]].append((began - first, ms))
            seen[name] += 1
    if any(len(times) != len(calls) for times in spans.values()):
        raise SystemExit("the profiled calls launch different kernels; profile again")
    order = sorted(spans.items(), key=lambda item: median(began for began, _ in item[1]))
    return [
        Entry(
            table="launches",
            of={"place": place, "kernel": name},
            figures={"ms": median(ms for _, ms in times)},
        )
        for place, ((name, _), times) in enumerate(order)
    ]


def profiled(call: Callable[[], object]) -> list[Entry]:
    """Profile `CALLS` consecutive calls and return the launches of one."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    events = [e for e in profile.events() or () if e.device_type.name == "CUDA"]
    events.sort(key=lambda e: e.time_range.start)
    size, rest = divmod(len(events), CALLS)
    if rest or not size:
        raise SystemExit(f"{len(events)} launches in {CALLS} calls: they differ; profile again")
    launches = [
        (e.name[:NAME_LENGTH], e.time_range.start, e.time_range.elapsed_us() / 1e3) for e in events
    ]
    return launches_of([launches[i : i + size] for i in range(0, len(launches), size)])


def profile_tree(name: str, loaded: Loaded, commit: str | None) -> Run:
    """Time the loop, then profile calls of another layer."""
    clocks.soak(1)
    copy, product = clocks.copy_bandwidth(), clocks.product_tflops(torch.bfloat16)
    torch.cuda.empty_cache()
    timing = time_layer(loaded.layer_class, TOKENS, DEVICE)
    layer = loaded.layer_class(**WORKLOAD.layer_arguments()).to(DEVICE)
    x = torch.randn(WORKLOAD.batch_size, TOKENS, WORKLOAD.hidden_size, device=DEVICE)
    output: object = None

    def call() -> None:
        nonlocal output  # stays allocated during the next call, as in the validator's loop
        with recording(DEVICE):
            output = layer(x)

    for _ in range(WARMUP_CALLS):
        call()
    torch.cuda.synchronize()
    settings = {
        "tree": name,
        "tokens": TOKENS,
        "calls": CALLS,
        "call_ms": timing.elapsed_seconds * 1e3 / WORKLOAD.timed_calls,
        "copy_gb_per_s": copy,
        "product_tflops": product,
    }
    return start("layer_profile", "", commit, settings=settings).adding(*profiled(call))


options = trees.options


def measure(args: argparse.Namespace) -> Iterator[Run]:
    with trees.loaded(args.fork, trees.TREES[args.tree]) as tree:
        yield profile_tree(args.tree, tree, args.commit)
