"""What Nsight Compute says of the kernels of a call: its raw page as schema-checked models, floors.

profile.py writes such a run; benchmarks.report makes the document's tables of it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from benchmarks.results import Frozen, Positive, Run

Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=0, le=101, allow_inf_nan=False)]

UTILISATION = {
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""Percentages of a peak, over a kernel's time, by the name they have here."""

OPERATIONS = {
    "bf16": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "fp16": "sm__ops_path_tensor_src_fp16.sum",
    "tf32": "sm__ops_path_tensor_src_tf32_dst_fp32.sum",
}
"""Operations of the tensor cores, a multiplication and an addition counted apart, by operands."""

_SIZES = {
    "ns": "gpu__time_duration.sum",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "registers": "launch__registers_per_thread",
}
METRICS = (*UTILISATION.values(), *OPERATIONS.values(), *_SIZES.values())
"""What ncu is asked for."""


class KernelProfile(Frozen):
    """One launch of a kernel."""

    name: str
    ms: Positive
    registers: int = Field(ge=1, description="of a thread")
    dram_bytes: Count = Field(description="read and written")
    operations: dict[str, Count] = Field(description="of the tensor cores, by operands")
    percent: dict[str, Percent] = Field(description="of the peak, by UTILISATION's names")


class CallProfile(Frozen):
    """The kernels of one call, in their order."""

    tokens: int
    least_bytes: int = Field(description="inputs read once and the output written once")
    kernels: tuple[KernelProfile, ...] = Field(min_length=1)


class Profile(Run):
    """A run of profile.py on one GPU."""

    protocol: str
    ncu: str = Field(description="version of Nsight Compute")
    copy_gb_per_s: Positive = Field(description="device copy of 1 GiB, both directions counted")
    product_tflops: dict[str, Positive] = Field(description="of large products, by operands")
    calls: dict[str, CallProfile]


def parse(text: str) -> list[KernelProfile]:
    """Read `ncu --csv --page raw --print-units base`: a row a launch, in the order of launches.

    Raises:
        ValueError: there is no table, or a metric is missing, has another unit or has no value.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise ValueError(f"ncu profiled no kernel:\n{text[-2000:]}")
    rows = csv.DictReader(lines)
    units = next(rows)
    missing = [name for name in METRICS if name not in units]
    if missing:
        raise ValueError(f"ncu did not report {', '.join(missing)}")
    for name, unit in ((_SIZES["ns"], "ns"), (_SIZES["read"], "byte"), (_SIZES["written"], "byte")):
        if units[name] != unit:
            raise ValueError(f"ncu reports {name} in {units[name]}, not in {unit}")
    return [_kernel(row) for row in rows]


def _kernel(row: Mapping[str, str]) -> KernelProfile:
    def number(metric: str) -> float:
        try:
            return float(row[metric].replace(",", ""))
        except ValueError:
            message = f"ncu reports {row[metric]!r} as {metric} of {row['Kernel Name']}"
            raise ValueError(message) from None

    sizes = {name: number(metric) for name, metric in _SIZES.items()}
    return KernelProfile(
        name=row["Kernel Name"].partition("(")[0],
        ms=sizes["ns"] / 1e6,
        registers=int(sizes["registers"]),
        dram_bytes=sizes["read"] + sizes["written"],
        operations={kind: number(metric) for kind, metric in OPERATIONS.items()},
        percent={name: number(metric) for name, metric in UTILISATION.items()},
    )


def bytes_ms(profile: Profile, size: float) -> float:
    """Return the time that a copy takes to move so many bytes."""
    return size / profile.copy_gb_per_s / 1e6


def products_ms(profile: Profile, kernel: KernelProfile) -> float:
    """Return the time that large products take for as many operations on the same operands."""
    rates = profile.product_tflops
    return math.fsum(n / rates[kind] / 1e9 for kind, n in kernel.operations.items())


def floor_ms(profile: Profile, kernel: KernelProfile) -> float:
    """Return the least time for the bytes and the products of a kernel, which may overlap."""
    return max(bytes_ms(profile, kernel.dram_bytes), products_ms(profile, kernel))
