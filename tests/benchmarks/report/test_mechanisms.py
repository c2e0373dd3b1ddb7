"""The tables and plots across mechanisms, made of runs that nobody measured."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.cases.mechanisms import bound_ms
from benchmarks.engine.mechanism_work import call_of
from benchmarks.engine.results import DATA, Entry, Run, load
from benchmarks.mechanisms import implementations
from benchmarks.report import mechanisms
from benchmarks.report.documents import RESULTS
from tests.benchmarks.runs import run_of

DOCUMENT = RESULTS / "models.md"
SVG = "{http://www.w3.org/2000/svg}"


def row(name, way, tokens, ms, *, batch=1, packed=False, operations=0.0):
    in_a_row = {"in_a_row_ms": 0.625} if tokens == 65_536 else {}
    figures = {
        "ms": ms,
        **in_a_row,
        "peak_bytes": 3 << 29,
        "moved_bytes": 10**9,
        "operations": operations,
    }
    errors = {"o": 1e-3} if way != "forward and backward" else {"q": 1e-3, "k": 2e-3}
    of = call_of(way, tokens, batch, packed=packed)
    return Entry(
        table="calls", of=of, by=name, figures=figures, errors=errors, texts={"clock": "graph"}
    )


@pytest.fixture
def run() -> Run:
    """A run of figures that nobody measured."""
    setting = {"setting": "kept", "parameters": 3_800_000, "batch": 64, "tokens": 512}
    trained = {"step_ms": 32.768, "peak_bytes": 5 << 30, "loss": 5.5, "busy": 0.83}
    late = call_of("forward", 1_048_576)
    return run_of(
        "mechanisms",
        row("softmax", "forward", 65_536, 4.0, operations=1e12),
        row("quasar", "forward", 256, 0.02),
        row("quasar", "forward", 65_536, 0.5),
        row("quasar", "forward", 65_536, 0.75, packed=True),
        row("quasar", "decoding", 1, 0.032, batch=64),
        row("kda", "forward and backward", 65_536, 2.5),
        Entry(table="training", of=setting, by="model", figures=trained, texts={"rwkv6": "triton"}),
        Entry(table="calls", of=late, by="softmax", failure="it would take 2 s"),
        Entry(table="calls", by="rwkv7", failure="ImportError: a | b"),
        versions={"fla-core": "1.0"},
        settings={
            "copy_gb_per_s": 4000,
            "product_tflops": 500,
            "seconds": 150,
            "limit_seconds": 200,
        },
    )


def test_the_bound_is_that_of_memory_or_of_products(run):
    softmax, quasar = run.entries[0], run.entries[2]
    assert bound_ms(run, softmax) == pytest.approx(2.0)  # 1e12 at 500 TFLOP/s
    assert bound_ms(run, quasar) == pytest.approx(0.25)  # 1 GB at 4 TB/s


def test_the_tables_show_the_run(run):
    text = mechanisms.tables(run)
    assert "| Quasar, quasar_kernels | 0.020 | 0.500 | 131 |" in text
    assert "| softmax attention, torch | - | 4.00 |" in text
    detail = (
        "| Quasar, quasar_kernels, forward | 65,536 | 0.500 | 131 | 50% | 1.50 | 0.625 | 0.750 |"
    )
    assert f"{detail} 1.0e-03 (o) |" in text
    assert "2.0e-03 (k)" in text
    assert "| 64 | 32.0 | graph | 2 |" in text
    assert "| kept | 3.80 M | 64 x 512 | 32.77 | 1 | 5.00 | 83% | rwkv6: triton |" in text
    assert "softmax attention, torch: forward, 1,048,576 tokens | it would take 2 s |" in text
    assert "RWKV-7, fla-core: all else | ImportError: a \\| b |" in text


def test_a_plot_has_a_point_for_every_length(run):
    drawn = ElementTree.fromstring(mechanisms.plot(run, "forward"))  # noqa: S314 made here
    dots = [len(list(panel.iter(f"{SVG}circle"))) for panel in drawn.findall(f"{SVG}g")]
    reference = dots[-1]  # softmax attention alone, which is in every panel
    assert dots == [3, *[reference] * (len(dots) - 1)]
    labels = {e.text for e in drawn.iter(f"{SVG}text")}
    assert {"softmax attention", "Quasar"} <= labels


def test_a_mechanism_without_a_family_has_a_panel():
    assert mechanisms.families({"Quasar", "new one"}) == {
        **mechanisms.FAMILIES,
        "Other mechanisms": {"new one": mechanisms.COLOUR},
    }


def test_every_implementation_of_the_committed_run_is_known():
    run = load(DATA / "mechanisms.json")
    assert {entry.by for entry in run.table("calls")} <= set(implementations())
