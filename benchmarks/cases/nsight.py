"""The kernels of one call of the operator and of the layer, by Nsight Compute on a GPU.

    python -m benchmarks nsight --out benchmarks/h200/profile.json

This process first measures the rates of a large copy and of large products. It then runs each call
in a fresh process under `ncu`, which must be on PATH and needs permission to read the GPU's
counters. The clocks are not locked.
"""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.operator import named, selected
from benchmarks.engine import clocks, commands
from benchmarks.engine.results import Entry, Run, start
from harness.tuning.inputs import layer_like
from harness.worker.subject.timing import recording
from harness.workload import WORKLOAD
from quasar_kernels.mount import mount

TOKENS = 1_000_000
NCU = "ncu --clock-control=none --profile-from-start=off --csv --page=raw --print-units=base"
UTILISATION = {
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""Metrics in percent of a peak, averaged over a kernel's time, by their names in the results."""

OPERATIONS = {
    "bf16": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "fp16": "sm__ops_path_tensor_src_fp16.sum",
    "tf32": "sm__ops_path_tensor_src_tf32_dst_fp32.sum",
}
"""Operations of the tensor cores by type of operands; a multiply-add counts as two."""

METRICS = (
    *UTILISATION.values(),
    *OPERATIONS.values(),
    *("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"),
    "launch__registers_per_thread",
)
"""All metrics that ncu reports; times are in nanoseconds."""

PROTOCOL = """\
Nsight Compute, clocks left alone, caches emptied before each kernel, kernels one at a time. \
Operator: chunk_quasar with QUASAR_BACKEND=cuda, B = 1, H = 8, S = 64, bf16, inputs as a layer \
with default weights makes them. Layer: QuasarAttention(512, head_dim=64, num_heads=8) on fp32 \
input under bf16 autocast, gradients recorded. Each call runs three times before the one that is \
profiled. Copy: 1 GiB on the device, both directions counted; products: of 8192 x 8192 matrices; \
both by CUDA-graph replays at the clocks of sustained work."""


def operator_call(tokens: int) -> Callable[[], object]:
    x = named(layer_like(tokens))

    def call() -> None:
        with torch.no_grad(), selected("cuda") as run:
            run(x)

    return call


def layer_call(tokens: int) -> Callable[[], object]:
    from fla.layers.quasar import QuasarAttention

    layer = QuasarAttention(**WORKLOAD.layer_arguments()).cuda()
    x = torch.randn(WORKLOAD.batch_size, tokens, WORKLOAD.hidden_size, device="cuda")

    def call() -> None:
        with recording(x.device):
            layer(x)

    return call


CALLS = {"operator": operator_call, "layer": layer_call}
LEAST_BYTES = {
    "operator": 4 * 2 * WORKLOAD.num_heads * WORKLOAD.head_dim,
    "layer": (4 + 2) * WORKLOAD.hidden_size,
}
"""Bytes per token that must be moved: q, k, v and o; the layer's input and output."""


def run_call(name: str, tokens: int) -> None:
    """Run a call three times, then once under the profiler."""
    mount()
    torch.manual_seed(0)
    call = CALLS[name](tokens)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def profile_call(name: str, tokens: int) -> Iterator[Entry]:
    """Run `run_call` under ncu; yield the entries of the call and of its kernels, in order.

    Raises:
        SystemExit: ncu failed; the message has its output.
        KeyError, ValueError: as `parse`.
    """
    code = f"from {__name__} import run_call; run_call({name!r}, {tokens})"
    call = [sys.executable, "-c", code]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ncu.csv")
        command = [*NCU.split(), f"--metrics={','.join(METRICS)}", f"--log-file={log}", *call]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = log.read_text() if log.exists() else ""
    if done.returncode:
        sys.exit(f"ncu ended with status {done.returncode}:\n{text[-2000:]}\n{done.stderr[-2000:]}")
    of = {"call": name, "tokens": tokens}
    yield Entry(table="calls", of=of, figures={"least_bytes": LEAST_BYTES[name] * tokens})
    for place, kernel in enumerate(parse(text)):
        yield kernel.model_copy(update={"of": {**of, "place": place}})


def parse(text: str) -> list[Entry]:
    """Read `ncu --csv --page raw --print-units base`: one row for each launch, in their order.

    Raises:
        KeyError, ValueError: there is no table, or a metric is missing or has no value.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise ValueError(f"ncu profiled no kernel:\n{text[-2000:]}")
    _units, *rows = csv.DictReader(lines)
    return [_kernel(row) for row in rows]


def _kernel(row: Mapping[str, str]) -> Entry:
    def number(metric: str) -> float:
        return float(row[metric].replace(",", ""))

    return Entry(
        table="kernels",
        figures={
            "ms": number("gpu__time_duration.sum") / 1e6,
            "registers": int(number("launch__registers_per_thread")),
            "dram_bytes": number("dram__bytes_read.sum") + number("dram__bytes_write.sum"),
            **{f"{kind}_operations": number(metric) for kind, metric in OPERATIONS.items()},
            **{f"{name}_percent": number(metric) for name, metric in UTILISATION.items()},
        },
        texts={"kernel": row["Kernel Name"].partition("(")[0]},
    )


def product_rates() -> dict[str, float]:
    """Return the rates of large products, TFLOP/s, by type of operands."""
    torch.backends.cuda.matmul.allow_tf32 = True
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
    try:
        return {kind: clocks.product_tflops(dtype) for kind, dtype in kinds.items()}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def measure(args: argparse.Namespace) -> Iterator[Run]:
    version = commands.tool_version("ncu", "the CUDA toolkit or Nsight Compute")
    with torch.no_grad():
        clocks.soak(1)
        copy, rates = clocks.copy_bandwidth(), product_rates()
    clocks.free()
    settings = {"copy_gb_per_s": copy, **{f"{kind}_tflops": r for kind, r in rates.items()}}
    versions = {"Nsight Compute": version}
    run = start("nsight", PROTOCOL, args.commit, versions=versions, settings=settings)
    for name in CALLS:
        run = run.adding(*profile_call(name, TOKENS))
        yield run


def bytes_ms(run: Run, size: float) -> float:
    """Return the milliseconds that a copy of `size` bytes takes."""
    return size / run.number("copy_gb_per_s") / 1e6


def products_ms(run: Run, kernel: Entry) -> float:
    """Return the milliseconds that large products take for the kernel's operations, by type."""
    counts = {kind: kernel.figures[f"{kind}_operations"] for kind in OPERATIONS}
    return math.fsum(n / run.number(f"{kind}_tflops") / 1e9 for kind, n in counts.items())


def floors(run: Run, call: Entry) -> list[dict[str, Any]]:
    """Return the figures of a call's kernels and of the whole call, with their floors.

    A floor is the least time for the bytes and the products, which may overlap.
    """
    kernels = [one for one in run.table("kernels") if one.of["call"] == call.of["call"]]
    products = [products_ms(run, kernel) for kernel in kernels]
    rows: list[dict[str, Any]] = [
        {
            **kernel.figures,
            "kernel": kernel.texts["kernel"],
            "floor_ms": max(bytes_ms(run, kernel.figures["dram_bytes"]), ms),
        }
        for kernel, ms in zip(kernels, products, strict=True)
    ]
    whole = {
        "kernel": "whole call",
        "ms": math.fsum(row["ms"] for row in rows),
        "dram_bytes": math.fsum(row["dram_bytes"] for row in rows),
        "floor_ms": max(bytes_ms(run, call.figures["least_bytes"]), math.fsum(products)),
    }
    return [*rows, whole]
