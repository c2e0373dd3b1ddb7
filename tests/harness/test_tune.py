"""The search of constants: speeds follow from constants in the changed sources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import log
from pathlib import Path
from typing import Any

import pytest

from harness import constants as table
from harness import tune as module
from harness.constants import TABLE, Constant, MissingConstantError
from harness.measuring.runner import MeasurementError, Options
from harness.sample import Sample
from harness.search import Gpu, Search, Trial, tune
from harness.tune import Trials, earlier_trials
from quasar_kernels.contract import OVERLAY, QUASAR_DIR, check_tree, copy_overlay, overlay_files
from tests.harness import samples
from tests.processes import HANG

LONG, CHECK_EVERY = TABLE[0], TABLE[2]


def number(path: Path, name: str) -> int:
    """Return a constant in a source file."""
    return int(re.findall(rf"\b{name} = (\d+)", path.read_text())[0])


def timed(tree: Path, length: int, *_: Any, **__: Any) -> Sample:
    """Return a sample whose speed is highest for the shipped constants."""
    folder = tree / QUASAR_DIR / "cuda/scan"
    long = number(folder / "scan_forward.py", "LONG")
    every = number(folder / "csrc/segment_map.cu", "CHECK_EVERY")
    return samples.make_sample(length, 1000 - 50 * abs(log(long / 3072)) - 10 * abs(log(every / 4)))


def passed(_tree: Path, length: int, *_: Any) -> Any:
    return samples.make_correctness(longest=length)


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the overlay; candidates are not laid over fla, because nothing imports them."""
    monkeypatch.setattr("harness.search.whole_tree", nullcontext)
    copy_overlay(OVERLAY, tmp_path / "overlay")
    return tmp_path / "overlay"


def search_of(overlay: Path, **parts: Any) -> Search:
    given: dict[str, Any] = {
        "measure": timed,
        "check": passed,
        "keep": lambda _: None,
        "trials": [],
    }
    return Search(overlay=overlay, length=512, constants=[LONG, CHECK_EVERY], **given | parts)


def run(search: Search, tmp_path: Path, count: int = 20, gpus: int = 1) -> tuple[Trial, Any]:
    cards = [Gpu(Options("cpu", HANG), tmp_path / f"lock {n}") for n in range(gpus)]
    return tune(search, cards, at_once=2, count=count, seconds=HANG, blocks=5)


def changed_lines(overlay: Path) -> list[str]:
    return [
        line
        for name in overlay_files(root=overlay)
        for line in set((overlay / name).read_text().splitlines())
        - set((OVERLAY / name).read_text().splitlines())
    ]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_bad_constant_is_corrected(overlay, tmp_path, gpus):
    LONG.write(overlay, 1 << 30)
    assert changed_lines(overlay) == [f"LONG = {1 << 30}"]
    best, gain = run(search_of(overlay), tmp_path, gpus=gpus)
    assert gain.faster, gain
    assert best.changes == {"cuda/scan/scan_forward.py:LONG": 3072}
    assert changed_lines(overlay) == []
    assert not check_tree(overlay, strict=True)


def test_the_best_constants_stay(overlay, tmp_path):
    search = search_of(overlay)
    best, gain = run(search, tmp_path, count=40)
    assert (best.changes, gain) == ({}, None)
    assert len(search.trials) == len(LONG.values) + len(CHECK_EVERY.values) - 2
    assert changed_lines(overlay) == []


def test_a_lucky_candidate_is_refused_by_the_comparison(overlay, tmp_path):
    lucky = iter([*[1.0] * 3, *[1.1] * 3])
    speeds = lambda: 1000.0 * next(lucky, 1.0)  # noqa: E731
    search = search_of(
        overlay, measure=lambda _, length, *a, **k: samples.make_sample(length, speeds())
    )
    best, gain = run(search, tmp_path, count=1)
    assert best.changes
    assert not gain.faster, gain
    assert "no difference beyond the noise" in search.trials[0].refused
    assert search.best.changes == {}
    assert changed_lines(overlay) == []


def test_a_wrong_or_failing_candidate_is_refused(overlay, tmp_path):
    LONG.write(overlay, 1 << 30)

    def check(tree: Path, length: int, *_: Any) -> Any:
        return samples.make_correctness(passed=LONG.value(tree) == 1 << 30, longest=length)

    def measure(tree: Path, length: int, *_: Any, **__: Any) -> Sample:
        if LONG.value(tree) == 12288:
            raise MeasurementError("illegal address", "crash")
        return timed(tree, length)

    search = search_of(overlay, measure=measure, check=check)
    best, _ = run(search, tmp_path)
    refused = {
        trial.changes[str(LONG)]: trial.refused
        for trial in search.trials
        if str(LONG) in trial.changes
    }
    assert refused.pop(12288) == "illegal address"
    assert all(why.startswith("wrong results") for why in refused.values()), refused
    assert best.changes == {}


def test_an_interrupted_search_continues(overlay, tmp_path):
    new = Trials(overlay="digest", length=512, environment=samples.environment())
    file = tmp_path / "trials.json"

    def keep_in(search: Search, most: int) -> Callable[[Trial], None]:
        def keep(_: Trial) -> None:
            stored = new.model_copy(update={"trials": tuple(search.trials)})
            file.write_text(stored.model_dump_json())
            if len(search.trials) >= most:
                raise KeyboardInterrupt

        return keep

    search = search_of(overlay)
    search.keep = keep_in(search, 3)
    with pytest.raises(KeyboardInterrupt):
        run(search, tmp_path)
    assert changed_lines(overlay) == []
    again = search_of(overlay, trials=earlier_trials(file, new))
    assert len(again.trials) >= 3
    run(again, tmp_path, count=40)
    tried = [tuple(trial.changes.items()) for trial in again.trials]
    assert len(tried) == len(set(tried)) == len(LONG.values) + len(CHECK_EVERY.values) - 2
    assert earlier_trials(file, new.model_copy(update={"length": 1024})) == []
    file.write_text(file.read_text()[:-20])
    assert earlier_trials(file, new) == []


@pytest.mark.parametrize("constant", TABLE, ids=str)
def test_each_constant_is_in_the_overlay_with_a_listed_value(constant: Constant) -> None:
    """A renamed or moved constant must be changed in harness/constants.py too."""
    assert constant.value(OVERLAY) in constant.values
    assert list(constant.values) == sorted(constant.values)


def test_a_missing_constant_is_an_error(overlay):
    path = overlay / QUASAR_DIR / "cuda/scan/scan_forward.py"
    path.write_text(path.read_text().replace("LONG = 3072", "LARGE = 3072"))
    with pytest.raises(
        MissingConstantError, match=r"has 0 constants LONG in cuda/scan/scan_forward\.py"
    ):
        search_of(overlay).run([Gpu(Options("cpu", HANG), overlay / "lock")], 1, 1, HANG)


def test_a_gpu_gets_the_constants_that_it_reads():
    assert table.constants_for("7.5") == []
    names = {
        capability: [c.file for c in table.constants_for(capability)]
        for capability in ("8.6", "9.0", "10.0")
    }
    assert "projection.cu" in names["9.0"]
    assert "projection.cu" not in names["8.6"]
    assert names["8.6"] == names["10.0"]


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("scripts/step2_kernel_tuning.py", 78, "a CPU does not run the tuned kernels"),
        ("-m harness.tuning", 1, "`python -m harness.tune`"),
        ("-m harness.tune --blocks 4", 2, "--blocks must be at least 5"),
    ],
)
def test_what_cannot_be_tuned_is_explained(command, status, text):
    line = [sys.executable, *command.split()]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(line, capture_output=True, text=True, timeout=HANG, env=environ)
    assert (done.returncode, text in done.stderr) == (status, True), done.stderr


def test_an_overlay_that_cannot_be_written_is_explained(monkeypatch, capsys):
    monkeypatch.setattr(
        module, "probe", lambda _: samples.environment(compute_capability="9.0", gpu="a GPU")
    )
    assert module.main(["--overlay", "/proc/none/overlay"]) == 1
    assert "or name other files by --overlay and --storage" in capsys.readouterr().err
