"""The parser of ncu's raw page, on a recorded one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases.nsight import parse

RAW = (Path(__file__).parent / "ncu_raw.csv").read_text()
"""ncu 2025.3.1 on one call of 100,000 tokens, without the columns about the device."""


def test_a_recorded_page_is_read() -> None:
    kernels = parse(RAW)
    assert [kernel.texts["kernel"] for kernel in kernels] == [
        "quasar_segment_map_bf16",
        "quasar_segment_scan",
        "quasar_segment_output_bf16",
    ]
    output = kernels[-1]
    # in the page: 123,680 ns; 315,764,736 and 90,810,880 bytes
    assert output.figures["ms"] == pytest.approx(0.12368)
    assert output.figures["dram_bytes"] == 406_575_616
    assert output.figures["registers"] == 124
    counts = {"bf16": 34_417_410_048, "fp16": 1_434_058_752, "tf32": 1_229_193_216}
    assert {kind: output.figures[f"{kind}_operations"] for kind in counts} == counts
    percent = {"dram": 68.33, "tensor": 39.64, "shared": 49.80, "issue": 44.75, "warps": 22.42}
    assert {name: output.figures[f"{name}_percent"] for name in percent} == percent


def test_a_page_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="No kernels were profiled"):
        parse("==PROF== Connected\n==WARNING== No kernels were profiled.\n")
