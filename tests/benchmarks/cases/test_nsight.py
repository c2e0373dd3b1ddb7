"""The profile: ncu's raw page as it was recorded, floors, and the tables made of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.cases.nsight import METRICS, bytes_ms, floor_ms, parse, products_ms
from benchmarks.engine.results import Entry, Run
from benchmarks.report.kernel_tools import call_profile, profile
from tests.benchmarks.runs import run_of

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
    # as the page says it: 123,680 ns; 315,764,736 and 90,810,880 bytes
    assert output.figures["ms"] == pytest.approx(0.12368)
    assert output.figures["dram_bytes"] == 406_575_616
    assert output.figures["registers"] == 124
    counts = {"bf16": 34_417_410_048, "fp16": 1_434_058_752, "tf32": 1_229_193_216}
    assert {kind: output.figures[f"{kind}_operations"] for kind in counts} == counts
    percent = {"dram": 68.33, "tensor": 39.64, "shared": 49.80, "issue": 44.75, "warps": 22.42}
    assert {name: output.figures[f"{name}_percent"] for name in percent} == percent


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (METRICS[0], "other__metric", f"did not report {re.escape(METRICS[0])}"),
        ('"ns"', '"us"', "gpu__time_duration.sum in us, not in ns"),
    ],
)
def test_a_page_that_says_something_else_is_refused(old: str, new: str, said: str) -> None:
    assert old in RAW
    with pytest.raises(ValueError, match=said):
        parse(RAW.replace(old, new))


def test_a_value_that_is_none_is_named() -> None:
    lines = RAW.splitlines()
    place = next(i for i, line in enumerate(lines) if "quasar_segment_scan" in line)
    (header,) = (line for line in lines if line.startswith('"ID"'))
    column = header.split('","').index("launch__registers_per_thread")
    cells = lines[place].split('","')
    cells[column] = "n/a"
    lines[place] = '","'.join(cells)
    with pytest.raises(ValueError, match="'n/a' as launch__registers_per_thread of quasar_segment"):
        parse("\n".join(lines))


def test_a_run_that_saw_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="No kernels were profiled"):
        parse("==PROF== Connected\n==WARNING== No kernels were profiled.\n")


def kernel(place: int, name: str, ms: float, gigabytes: float, **operations: float) -> Entry:
    percent = {"dram": 60.4, "tensor": 40.0, "shared": 50.0, "issue": 45.0, "warps": 25.0}
    figures = {
        "ms": ms,
        "registers": 128,
        "dram_bytes": gigabytes * 1e9,
        **{f"{kind}_operations": operations.get(kind, 0) for kind in ("bf16", "fp16", "tf32")},
        **{f"{name}_percent": value for name, value in percent.items()},
    }
    of = {"call": "operator", "tokens": 1_000_000, "place": place}
    return Entry(table="kernels", of=of, figures=figures, texts={"kernel": name})


@pytest.fixture
def run() -> Run:
    """Two kernels at 4 TB/s and 500 TFLOP/s, half of that in tf32."""
    of = {"call": "operator", "tokens": 1_000_000}
    return run_of(
        "nsight",
        Entry(table="calls", of=of, figures={"least_bytes": 2_000_000_000}),
        kernel(0, "maps", 1.0, 2.0, bf16=1e11),
        kernel(1, "outputs", 1.5, 1.0, bf16=2e11, tf32=1e11),
        versions={"Nsight Compute": "2025.3"},
        settings={
            "copy_gb_per_s": 4000,
            "bf16_tflops": 500,
            "fp16_tflops": 500,
            "tf32_tflops": 250,
        },
    )


def test_a_floor_is_the_longer_of_bytes_and_products(run: Run) -> None:
    maps, outputs = run.table("kernels")
    assert bytes_ms(run, maps.figures["dram_bytes"]) == pytest.approx(0.5)
    assert products_ms(run, maps) == pytest.approx(0.2)
    assert floor_ms(run, maps) == pytest.approx(0.5)
    # 2e11 / 5e14 s and 1e11 / 2.5e14 s
    assert products_ms(run, outputs) == pytest.approx(0.8)
    assert floor_ms(run, outputs) == pytest.approx(0.8)


def test_the_table_has_each_kernel_and_the_call(run: Run) -> None:
    text = call_profile(run, run.table("calls")[0]).splitlines()
    assert text[2] == "| maps | 1.000 | 60 | 40 | 50 | 45 | 25 | 128 | 2.00 | 0.500 | 2.0 |"
    # together: 2 GB at the least are 0.5 ms, all products 1.0 ms
    assert text[4] == "| whole call | 2.500 |  |  |  |  |  |  | 3.00 | 1.000 | 2.5 |"
    assert len(text) == 5
    assert len({line.count("|") for line in text}) == 1
    assert "copies 4.00 TB/s; products bf16 500, fp16 500, tf32 250 TFLOP/s" in profile(run)
