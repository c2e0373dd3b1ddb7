"""One tree's layer under torch's profiler, or under Nsight Compute.

    python -m harness.worker.subject.profile TREE LENGTH DEVICE

This command loads a fork or an overlay and makes the warm-up calls. It then makes one more call,
on a GPU between cudaProfilerStart and cudaProfilerStop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from harness.measuring.job import Profile, ProfileRow
from harness.measuring.trees import whole_tree
from harness.worker.subject.timing import recording, synchronize
from harness.worker.subject.tree import load_tree
from harness.workload import WORKLOAD


def _prepared(
    tree: str, length: int, device_name: str
) -> tuple[Callable[[], object], torch.device]:
    """Return the validator's call of the tree's layer, after the warm-up calls."""
    on_gpu = torch.cuda.is_available() and device_name != "cpu"
    device = torch.device("cuda" if on_gpu else "cpu")
    layer = load_tree(Path(tree)).layer_class(**WORKLOAD.layer_arguments()).to(device)
    x = torch.randn(WORKLOAD.batch_size, length, WORKLOAD.hidden_size, device=device)

    def forward() -> object:
        with recording(device):
            return layer(x)

    for _ in range(WORKLOAD.warmup_calls):
        forward()
    synchronize(device)
    return forward, device


def profile_tree(tree: str, length: int, device_name: str, trace: str) -> Profile:
    """Profile the timed calls at `length` tokens; write their trace in Chrome's format."""
    forward, device = _prepared(tree, length, device_name)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(WORKLOAD.timed_calls):
            forward()
        synchronize(device)
    profiler.export_chrome_trace(trace)
    on_gpu = device.type == "cuda"
    own_time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times: dict[str, tuple[int, float]] = {
        event.key: (event.count, getattr(event, own_time)) for event in profiler.key_averages()
    }
    whole = sum(microseconds for _, microseconds in times.values()) or 1.0
    rows = [
        ProfileRow(
            name=name,
            calls=count / WORKLOAD.timed_calls,
            ms=microseconds / 1e3 / WORKLOAD.timed_calls,
            share=microseconds / whole,
        )
        for name, (count, microseconds) in times.items()
        if microseconds > 0
    ]
    rows.sort(key=lambda row: row.ms, reverse=True)
    return Profile(device="cuda" if on_gpu else "cpu", rows=tuple(rows))


def main() -> None:
    """Call the layer once, for a profiler of this process."""
    name, length, device_name = sys.argv[1:]
    with whole_tree(Path(name)) as tree:
        forward, device = _prepared(str(tree), int(length), device_name)
    if device.type == "cuda":
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    forward()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
