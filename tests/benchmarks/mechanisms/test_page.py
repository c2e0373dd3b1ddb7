"""The table across mechanisms, made of runs that nobody measured."""

from __future__ import annotations

from datetime import date
from xml.etree import ElementTree

import pytest

from benchmarks.learning import page as learning
from benchmarks.mechanisms import page
from benchmarks.mechanisms.results import (
    MechanismsResults,
    Missing,
    Rates,
    Row,
    Trained,
    bound_ms,
)
from benchmarks.report.documents import RESULTS
from benchmarks.results import load, write
from tests.harness import samples

DOCUMENT = RESULTS / "models.md"


def row(name, way, tokens, ms, *, batch=1, packed=False, operations=0.0):
    return Row(
        name=name, way=way, batch=batch, tokens=tokens, packed=packed, ms=ms, clock="graph",
        in_a_row_ms=0.625 if tokens == 65_536 else None,
        peak_bytes=3 << 29, moved_bytes=10**9, operations=operations,
        errors={"o": 1e-3} if way != "forward and backward" else {"q": 1e-3, "k": 2e-3},
    )  # fmt: skip


@pytest.fixture
def results():
    """A run of figures that nobody measured."""
    return MechanismsResults(
        created=date(2026, 1, 1), commit=None, environment=samples.environment(),
        protocol="made up", versions={"fla-core": "1.0"}, variants=8,
        limit_seconds=200, seconds=150,
        rates=Rates(copy_gb_per_s=4000, product_tflops=500),
        rows=(
            row("softmax", "forward", 65_536, 4.0, operations=1e12),
            row("quasar", "forward", 256, 0.02), row("quasar", "forward", 65_536, 0.5),
            row("quasar", "forward", 65_536, 0.75, packed=True),
            row("quasar", "decoding", 1, 0.032, batch=64),
            row("kda", "forward and backward", 65_536, 2.5),
        ),
        trained=(
            Trained(setting="kept", parameters=3_800_000, batch=64, tokens=512, step_ms=32.768,
                    peak_bytes=5 << 30, loss=5.5, busy=0.83, backends={"rwkv6": "triton"}),
        ),
        missing=(
            Missing(name="softmax", way="forward", tokens=1_048_576, reason="it would take 2 s"),
            Missing(name="rwkv7", reason="ImportError: a | b"),
        ),
    )  # fmt: skip


def test_the_bound_is_that_of_memory_or_of_products(results):
    softmax, quasar = results.rows[0], results.rows[2]
    assert bound_ms(softmax, results.rates) == pytest.approx(2.0)  # 1e12 at 500 TFLOP/s
    assert bound_ms(quasar, results.rates) == pytest.approx(0.25)  # 1 GB at 4 TB/s


def test_the_tables_say_what_the_run_says(results):
    text = page.tables(results)
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


def test_a_plot_has_a_point_for_every_length(results):
    drawn = ElementTree.fromstring(page.plot(results, "forward"))  # noqa: S314 made a line above
    panels = drawn.findall("{http://www.w3.org/2000/svg}g")
    dots = [len(list(panel.iter("{http://www.w3.org/2000/svg}circle"))) for panel in panels]
    reference = dots[-1]  # softmax attention alone, which is in every panel
    assert dots == [3, *[reference] * (len(panels) - 1)]
    labels = {e.text for e in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"softmax attention", "Quasar"} <= labels


def test_the_page_shows_a_run_once_there_is_one(results, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RUN", tmp_path / "run.json")
    for name in ("RECALL", "TEXT"):  # the same document tells of these runs
        monkeypatch.setattr(learning, name, tmp_path / name)
    before = page.documents()
    assert list(before) == [DOCUMENT]
    assert before[DOCUMENT].count("No run of it is committed yet.") >= 1
    write(page.RUN, results)
    assert load(MechanismsResults, page.RUN) == results
    shown = page.documents()
    assert set(shown) == {DOCUMENT, *page.PLOTS.values()}
    assert "| Quasar, quasar_kernels | 0.020 |" in shown[DOCUMENT]
    # a run that reached nothing has tables that say so, and no plots
    write(page.RUN, results.model_copy(update={"rows": (), "trained": ()}))
    assert set(page.documents()) == {DOCUMENT}
    assert "Nothing was measured." in page.documents()[DOCUMENT]
