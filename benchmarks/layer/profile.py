"""Profile the layer's forward pass on this GPU, kernel by kernel, in the validator's loop.

    python -m benchmarks.layer.profile --fork PATH --out benchmarks/h200/layer-profile.json

PATH is a checkout of the public fork; --tree takes another of the trees than the overlay. The time
of a call is taken without the profiler; the bandwidth of a copy and the rate of a product, of which
the floors in docs/benchmarks.md are made, are measured in the same process.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.engine import clocks, commands
from benchmarks.layer.calls import DEVICE
from benchmarks.layer.results import Launch, LayerProfile
from benchmarks.layer.trees import TREES, make_tree
from benchmarks.results import origin, write
from harness.worker.subject.timing import recording, time_layer
from harness.worker.subject.tree import Loaded, load_tree
from harness.workload import WORKLOAD

CALLS = 10
WARMUP_CALLS = 10
NAME_LENGTH = 300
"""Characters kept of a kernel's name; templates make some of them longer."""


def launches_of(calls: Sequence[Sequence[tuple[str, float, float]]]) -> list[Launch]:
    """Return the median time of each launch over calls that launch the same kernels.

    Args:
        calls: the (name, start, milliseconds) of each launch of each call.

    Raises:
        SystemExit: the calls do not launch the same kernels.
    """
    found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for call in calls:
        seen: dict[str, int] = defaultdict(int)
        first = min(start for _, start, _ in call)
        for name, start, ms in sorted(call, key=lambda launch: launch[1]):
            found[name, seen[name]].append((start - first, ms))
            seen[name] += 1
    if any(len(times) != len(calls) for times in found.values()):
        raise SystemExit("the profiled calls launch different kernels; profile again")
    order = sorted(found.items(), key=lambda item: median(start for start, _ in item[1]))
    return [Launch(kernel=name, ms=median(ms for _, ms in times)) for (name, _), times in order]


def profiled(call: Callable[[], object]) -> list[Launch]:
    """Profile `CALLS` calls in a row and return the launches of one."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    events = [e for e in profile.events() or () if e.device_type.name == "CUDA"]
    events.sort(key=lambda e: e.time_range.start)
    size, rest = divmod(len(events), CALLS)
    if rest or not size:
        raise SystemExit(f"{len(events)} launches in {CALLS} calls: they differ; profile again")
    found = [
        (e.name[:NAME_LENGTH], e.time_range.start, e.time_range.elapsed_us() / 1e3) for e in events
    ]
    return launches_of([found[i : i + size] for i in range(0, len(found), size)])


def profile_tree(name: str, loaded: Loaded, tokens: int, commit: str | None) -> LayerProfile:
    """Time the loop, then profile calls of a layer of its own."""
    clocks.soak(1)
    copy, product = clocks.copy_bandwidth(), clocks.product_tflops(torch.bfloat16)
    torch.cuda.empty_cache()
    timing = time_layer(loaded.layer_class, tokens, DEVICE)
    layer = loaded.layer_class(**WORKLOAD.layer_arguments()).to(DEVICE)
    x = torch.randn(WORKLOAD.batch_size, tokens, WORKLOAD.hidden_size, device=DEVICE)
    output: object = None

    def call() -> None:
        nonlocal output  # alive during the next call, as in the validator's loop
        with recording(DEVICE):
            output = layer(x)

    for _ in range(WARMUP_CALLS):
        call()
    torch.cuda.synchronize()
    return LayerProfile(
        **origin(commit),
        tree=name,
        tokens=tokens,
        calls=CALLS,
        call_ms=timing.elapsed_seconds * 1e3 / WORKLOAD.timed_calls,
        copy_gb_per_s=copy,
        product_tflops=product,
        launches=tuple(profiled(call)),
    )


def main() -> None:
    """Profile one tree and write the file."""
    parser = commands.options(__doc__, fork=True)
    parser.add_argument("--tree", choices=TREES, default="overlay")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_tree(make_tree(args.fork, Path(folder).resolve(), TREES[args.tree]))
        profile = profile_tree(args.tree, loaded, args.tokens, args.commit)
    write(args.out, profile)
    for launch in profile.launches:
        print(f"{launch.ms:9.4f} ms  {launch.kernel}")
    busy = sum(launch.ms for launch in profile.launches)
    print(f"{busy:9.4f} ms in kernels, {profile.call_ms:.4f} ms a call")


if __name__ == "__main__":
    main()
