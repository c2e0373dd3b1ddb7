"""The trees that are benchmarked, the committed reports, and the documents made from them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.layer.limits import OPS_SPEED, SPEED
from benchmarks.layer.page import FIRST_CALL, IN_README, MEMORY, plot
from benchmarks.layer.page import SPEED as SPEEDS
from benchmarks.layer.page import TREES as LABELS
from benchmarks.layer.trees import PEER, TREES, make_tree
from benchmarks.results import DATA
from harness.report import Report, load_report
from harness.workload import LENGTHS
from quasar_kernels.contract import OVERLAY
from tests.processes import run_python


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {name: load_report(DATA / f"{name}.json") for name in TREES}


def test_the_documents_say_what_the_reports_say() -> None:
    done = run_python("-m", "benchmarks.report", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["overlay", "overlay-ops"])
def test_every_figure_of_ours_stands_behind_a_green_gate(
    reports: dict[str, Report], name: str
) -> None:
    assert reports[name].failures == ()
    for measurement in reports[name].measurements:
        assert measurement.correctness is not None
        assert measurement.correctness.passed
        assert measurement.correctness.source_digest == measurement.source_digest


def test_the_reports_cover_every_limit(reports: dict[str, Report]) -> None:
    measured = {name: {m.length for m in report.measurements} for name, report in reports.items()}
    assert measured["overlay"] == set(LENGTHS)
    assert set(SPEED) <= measured["overlay"]
    assert set(OPS_SPEED) <= measured["overlay-ops"]
    for name, report in reports.items():  # a length without a figure says why there is none
        assert set(IN_README) <= measured[name] | {failure.length for failure in report.failures}


def test_all_reports_come_from_one_kind_of_machine_and_ours_from_one_commit(
    reports: dict[str, Report],
) -> None:
    for report in reports.values():  # the fork and the peer hold nothing of this project's kernels
        if report.measurements:
            assert report.environment == reports["overlay"].environment
    assert reports["overlay-ops"].commit == reports["overlay"].commit


@pytest.mark.parametrize("quantity", [SPEEDS, MEMORY, FIRST_CALL], ids=lambda q: q.plot)
def test_a_plot_has_a_point_for_every_length_of_every_tree(
    reports: dict[str, Report], quantity
) -> None:
    root = ElementTree.fromstring(plot(reports, quantity))  # noqa: S314 made a line above
    labels = {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {label for name, (label, _) in LABELS.items() if reports[name].measurements} <= labels
    points = {
        (name, m.length)
        for name, report in reports.items()
        for m in report.measurements
        if quantity is not FIRST_CALL or m.cache == "cold"
    }
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == len(points)


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """Make a fork with the layer and the operator of the public one's paths."""
    for file in ("ops/quasar/chunk.py", "ops/quasar/gate.py", "layers/quasar.py", "utils.py"):
        path = tmp_path / "fork" / "fla" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# the fork's {file}")
    return tmp_path / "fork"


def contents(tree: Path) -> dict[str, bytes]:
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_each_tree_is_the_fork_with_its_own_files_over_it(fork: Path, tmp_path: Path) -> None:
    original = contents(fork)
    made = {name: contents(make_tree(fork, tmp_path / name, TREES[name])) for name in TREES}
    assert made["public-fork"] == original
    operator = (PEER / "fla/ops/quasar/chunk.py").read_bytes()
    assert made["peer"] == original | {"fla/ops/quasar/chunk.py": operator}
    overlay = contents(OVERLAY)
    assert made["overlay"] == original | overlay
    layer = {"fla/layers/quasar.py": original["fla/layers/quasar.py"]}
    assert made["overlay-ops"] == original | overlay | layer
