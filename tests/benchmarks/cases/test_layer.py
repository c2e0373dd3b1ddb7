"""The timing of a tree: the check that a length needs, cold caches, and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import layer
from benchmarks.cases.trees import BASELINE, TREES, make_tree
from benchmarks.engine.commands import run_case
from benchmarks.engine.results import Entry, load
from harness.measuring.runner import MeasurementError
from quasar_kernels.contract import OVERLAY
from tests.benchmarks.runs import run_of
from tests.harness.samples import environment, make_correctness, make_sample
from tests.repositories import write_files

CALLS: list[tuple[int, bool, bool]] = []
SHORT, LONG = make_correctness(longest=512), make_correctness(longest=65536)


@pytest.fixture(autouse=True)
def fake_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the calls in place of measurements; 2,048 tokens fail in the second round."""
    CALLS.clear()
    monkeypatch.setattr(layer, "AT_ONCE", 1)

    def measure(
        _: Path, length: int, *__: Any, cross_check: bool, cold_cache: bool, gpu_lock: Path
    ) -> Any:
        CALLS.append((length, cross_check, cold_cache))
        if [call[0] for call in CALLS].count(2048) == 2 and length == 2048:
            raise MeasurementError("no memory", "out_of_memory")
        return make_sample(length, correctness=None)

    monkeypatch.setattr(layer, "timed", measure)


def time_tree(folder: Path, checks: dict[int, layer.Check], **changes: Any) -> list[Entry]:
    """Time the overlay with a changed plan."""
    plan = TREES["overlay"]._replace(**changes)
    subject = layer.Subject("overlay", folder, plan, checks)
    return dict(layer.time_trees([subject], folder / "gpu-lock", "cpu"))["overlay"]


def test_each_length_needs_the_check_of_the_next_one(tmp_path):
    checks: dict[int, layer.Check] = {512: SHORT, 2048: LONG}
    lengths = (512, 1024, 2048, 4096)
    found = time_tree(tmp_path, checks, lengths=lengths, short_runs=2, cold=(512, 4096))
    first = [(512, True, True), (1024, True, False), (2048, True, False), (4096, True, True)]
    assert [*first, *((length, True, False) for length, *_ in first)] == CALLS
    passed = {e.of["tokens"]: e.figures["checked_tokens"] for e in found if not e.failure}
    assert passed == {512: 512, 1024: 65536, 4096: 65536}
    timed = layer.by_length(run_of("layer", *found))
    assert {n: len(processes) for n, processes in timed.items()} == {512: 2, 1024: 2, 4096: 2}
    assert [(e.of["tokens"], e.failure) for e in found if e.failure] == [
        (2048, "out_of_memory: no memory")
    ]


def test_nothing_is_timed_after_a_failed_check(tmp_path):
    checks: dict[int, layer.Check] = {512: SHORT, 1024: MeasurementError("it died", "crash")}
    found = time_tree(tmp_path, checks, lengths=(512, 1024), short_runs=2)
    assert [length for length, *_ in CALLS] == [512, 512]
    assert [(e.of["tokens"], e.failure) for e in found if e.failure] == [(1024, "crash: it died")]


def test_a_tree_without_checks_is_timed_unchecked(tmp_path):
    (entry,) = time_tree(tmp_path, {}, lengths=(512,), short_runs=1)
    assert CALLS == [(512, False, True)]
    assert entry.figures["tokens_per_sec"] == 1000


def test_all_trees_are_timed_in_each_round_and_written_to_their_own_files(tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "probe", environment)
    names = ["public-fork", "overlay"]
    plans = {name: TREES[name]._replace(lengths=(512,), checks=(), short_runs=2) for name in names}
    monkeypatch.setattr(layer, "TREES", plans)
    monkeypatch.setattr(layer, "make_tree", lambda fork, folder, plan: folder)
    out = str(tmp_path / "{}.json")
    assert run_case(layer, ["--out", out, "--tree", *names, "--commit", "c0ffee"]) == 0
    for name in names:
        run = load(tmp_path / f"{name}.json")
        assert run.settings == {"tree": name}
        assert [(e.by, e.of["process"]) for e in run.entries] == [(name, 0), (name, 1)]


def test_a_small_card_is_timed_and_checked_at_the_lengths_that_fit() -> None:
    plan = TREES["overlay"].fitting(lambda n: n <= 300_000)
    assert plan.lengths[-1] == 262_144
    assert plan.checks[-1] == 100_000


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """Make a fork whose layer and operator have the paths of the public fork."""
    files = "ops/quasar/chunk.py", "ops/quasar/gate.py", "layers/quasar.py", "utils.py"
    write_files(tmp_path / "fork/fla", {file: f"# the fork's {file}" for file in files})
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
    operator = (BASELINE / "fla/ops/quasar/chunk.py").read_bytes()
    assert made["baseline"] == original | {"fla/ops/quasar/chunk.py": operator}
    overlay = contents(OVERLAY)
    assert made["overlay"] == original | overlay
    operators = {path: text for path, text in overlay.items() if path.startswith("fla/ops/")}
    assert made["overlay-ops"] == original | operators
    (changed,) = dict(made["overlay-portable"].items() ^ made["overlay"].items())
    assert changed == "fla/ops/quasar/cuda/nvrtc.py"
    assert b"HOPPER = (0, 0)" in made["overlay-portable"][changed]


def test_the_installed_fla_is_enough_for_a_tree_with_its_own_layer(tmp_path: Path) -> None:
    own = contents(make_tree(None, tmp_path / "own", TREES["overlay"]))
    assert contents(OVERLAY).items() <= own.items()
    with pytest.raises(SystemExit, match="--fork"):
        make_tree(None, tmp_path / "ops", TREES["overlay-ops"])
