"""The search for tiles: its result, its refusals, several GPUs, and a real kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from harness.analysis.difference import Block
from harness.tuning.__main__ import further_gpus, searchers
from harness.tuning.entry import TUNED, tiles_of, with_tiles
from harness.tuning.study import (
    CHOICES,
    Refused,
    Report,
    Tiles,
    best_tiles,
    candidates,
    conclude,
    done,
    open_study,
    search,
)
from quasar_kernels.contract import OVERLAY
from tests import AWKWARD
from tests.processes import is_alive, run_python, started, wait_for

START: Tiles = {name: values[0] for name, values in CHOICES.items()} | {"grad_warps": 4}


def cost(tiles: Tiles, report: Report) -> float:
    """Return at least 0.5, at two warps and three stages everywhere; refuse chunks of 32."""
    if tiles["chunk"] == 32:
        raise Refused("wrong on layer inputs")
    far = sum(abs(v.bit_length() - 2) for n, v in tiles.items() if n.endswith("_warps"))
    far += sum(abs(v - 3) for n, v in tiles.items() if n.endswith("_stages"))
    report(0, 0.5 + 0.05 * far)
    return 0.5 + 0.05 * far


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> optuna.Study:
    """A search of 40 trials, each with another footprint."""
    study = open_study(tmp_path_factory.mktemp("study") / "s.sqlite", "gpu", seed=1)
    footprints = ({"walk": {"registers": number}} for number in range(40))
    search(study, START, cost, trials=40, footprint=lambda: next(footprints))
    return study


def test_a_search_improves_a_bad_start(study: optuna.Study) -> None:
    assert done(study) == 40
    assert study.trials[0].params == {name: START[name] for name in CHOICES}
    best = best_tiles(study)
    assert best["chunk"] == 16
    assert best["grad_warps"] == 4
    assert cost(best, lambda *_: None) < 0.75 * cost(START, lambda *_: None)


def test_the_study_s_file_may_lie_in_any_folder(tmp_path: Path) -> None:
    file = tmp_path / AWKWARD / "tuning.sqlite"
    file.parent.mkdir()
    open_study(file, "search")
    assert file.stat().st_size > 0
    assert done(open_study(file, "search")) == 0


def test_every_candidate_is_listed_with_its_footprint(study: optuna.Study) -> None:
    rows = candidates(study)
    assert {one["footprint"]["walk"]["registers"] for one in rows} == {*range(40)}
    times = [one["time"] for one in rows if one["time"] is not None]
    assert times == sorted(times)
    assert {**START, **rows[0]["tiles"]} == best_tiles(study)
    refused = [one for one in rows if one["refused"]]
    assert refused == [one for one in rows if one["tiles"]["chunk"] == 32]
    assert refused
    assert all(one["time"] is None for one in refused)


@pytest.mark.parametrize(("gain", "better"), [(1.10, True), (1.001, False)])
def test_new_tiles_must_exceed_the_noise(study: optuna.Study, gain: float, better: bool) -> None:
    blocks = [Block(100.0, 100.0 * gain * n, 100.1) for n in (0.99, 1.01, 1.0, 0.995, 1.005)]
    tiles, _, evidence = conclude(study, blocks)
    assert (evidence["taken"], evidence["trials"]) == (better, 40)
    assert tiles == (best_tiles(study) if better else START)


def test_further_gpus_of_the_same_model_search_at_the_same_time(tmp_path: Path) -> None:
    models = {"a": "H200", "b": "H200", "c": "H100", "d": "H200", "e": "H200"}
    gpus = [SimpleNamespace(uuid=uuid, name=name) for uuid, name in models.items()]
    assert further_gpus(gpus, 0) == []
    chosen = further_gpus(gpus, 2)
    assert chosen == ["GPU-b", "GPU-d"]
    code = f"import os; os.mkdir({str(tmp_path)!r} + '/' + os.environ['CUDA_VISIBLE_DEVICES'])"
    with searchers([sys.executable, "-Sc", code], chosen):
        pass
    assert sorted(folder.name for folder in tmp_path.iterdir()) == chosen


def test_an_error_ends_the_search_on_further_gpus(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with suppress(ZeroDivisionError), searchers([sys.executable, "-Sc", code], ["GPU-b"]):
        wait_for(lambda: note.exists() and note.read_text())
        raise ZeroDivisionError
    assert not is_alive(int(note.read_text()))


def test_a_killed_search_is_continued(tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from harness.tuning.study import open_study, search\n"
        "from tests.harness.tuning.test_study import START, cost\n"
        "def slow(tiles, report):\n"
        "    time.sleep(0.05)\n"
        "    return cost(tiles, report)\n"
        f"search(open_study(Path({str(file)!r}), 'gpu'), START, slow, trials=10_000)\n"
    )

    study = open_study(file, "gpu")
    with started("-c", code) as process:
        wait_for(lambda: done(study) >= 6, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    survived = done(study)
    assert survived >= 5
    before = [trial.value for trial in study.trials if trial.value is not None]
    search(study, START, cost, trials=survived + 4)
    assert done(study) == survived + 4
    assert study.best_value <= min(before)


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA X1"])
def test_a_result_is_entered_only_for_its_gpu(gpu: str) -> None:
    data = json.loads((OVERLAY / TUNED).read_text())
    here = {"gpu": gpu, "capability": "9.0"}
    before = tiles_of(data, here)
    assert bool(before) == (gpu == "NVIDIA H200")
    evidence = {"trials": 9, "gain": {"ratio": 1.1, "low": 1.05, "high": 1.2}}
    entered = with_tiles(data, {**here, "tiles": START, "lengths": [512], "evidence": evidence})
    assert tiles_of(entered, here) == START
    assert tiles_of(entered, {**here, "capability": "8.0"}) == {}
    assert "+10.0% at 512 tokens" in entered["gpus"][gpu]["measured"]
    shapes = {
        (b, d)
        for row in entered["gpus"][gpu]["tiles"]
        for b in row["blocks"]
        for d in row["dtypes"]
    }
    assert len(shapes) == 4 * 3  # other shapes keep their tiles
    old = data["safe"][0]["tiles"]
    rows = data["gpus"][old]["tiles"] if isinstance(old, str) else old
    now = entered["safe"][0]["tiles"]
    assert (entered["gpus"][now]["tiles"] if isinstance(now, str) else now) == rows


def test_a_missing_optuna_and_wrong_lengths_are_explained(tmp_path):
    (tmp_path / "optuna.py").write_text("raise ModuleNotFoundError('optuna', name='optuna')\n")
    here = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run_python("scripts/step2_kernel_tuning.py", env=here)
    assert (done.returncode, done.stdout) == (78, "")
    assert re.fullmatch(
        r"The search needs Optuna\. Run \S+ -m pip install '?optuna\S*\n", done.stderr
    )
    done = run_python("scripts/step2_kernel_tuning.py", "--lengths=512,-1")
    assert done.returncode == 2
    assert "is not a list of lengths such as 512,1024" in done.stderr
