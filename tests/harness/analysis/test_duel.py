"""Two trees timed in turns: what their pairs say, and where trees come from."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.duel import Duel, checked_out, difference, main, plot, table
from harness.measuring.runner import MeasurementError
from tests.harness.samples import gate_result, measurement
from tests.repositories import commit, make_checkout


def test_the_interval_by_hand() -> None:
    found = difference([(100.0, 110.0), (100.0, 121.0)])
    half = 12.706 * math.log(1.1) / 2  # the half width of two logarithms ln 1.1 apart
    assert found.ratio == pytest.approx(1.1**1.5)
    assert found.low == pytest.approx(1.1**1.5 * math.exp(-half))
    assert not found.beyond_noise


def test_a_drift_that_both_share_cancels_out() -> None:
    pairs = [(100.0 * drift, 103.0 * drift) for drift in (1, 0.6, 1.7, 0.9)]
    found = difference(pairs)
    assert found.beyond_noise
    assert found.low == pytest.approx(1.03)
    assert found.high == pytest.approx(1.03)


def test_equal_trees_are_told_apart_as_rarely_as_promised() -> None:
    source = random.Random(3)
    wrong = 0
    for _ in range(2000):
        pairs = [(source.gauss(100, 5), source.gauss(100, 5)) for _ in range(5)]
        wrong += difference(pairs).beyond_noise
    assert 0.03 < wrong / 2000 < 0.07


@pytest.mark.parametrize("pairs", [[], [(1.0, 1.0)], [(1.0, 0.0)] * 3, [(1.0, math.nan)] * 3])
def test_what_is_no_data_is_refused(pairs: Any) -> None:
    with pytest.raises(ValueError, match=r"pairs|positive"):
        difference(pairs)


def test_both_take_turns_in_being_first() -> None:
    order: list[str] = []

    def timer(tree: Path, length: int, **_options: Any) -> Any:
        order.append(tree.name)
        return measurement(length, 100.0 if tree.name == "a" else 120.0)

    duel = Duel(pairs=3, gated=False, timer=timer)
    ((length, found),) = duel.run(Path("a"), Path("b"), [512])
    assert length == 512
    assert found.ratio == pytest.approx(1.2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert (found.a, found.b) == (100.0, 120.0)
    assert "| 512 | 100 | 120 | 1.200 | 1.200 to 1.200 |" in table([(length, found)])
    assert ">ours</text>" in plot([(length, found)], ("theirs", "ours"))


def test_a_red_gate_ends_the_comparison(tmp_path: Path) -> None:
    duel = Duel(pairs=2, checker=lambda *_, **__: gate_result(passed=False))
    with pytest.raises(MeasurementError, match="wrong results"):
        next(duel.run(tmp_path, tmp_path, [512]))


def test_a_tree_is_a_folder_or_a_commit(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path / "clone", {"fla/x.py": "old\n"})
    old = commit(repository, {"fla/x.py": "older\n"})
    commit(repository, {"fla/x.py": "new\n"})
    with checked_out(str(repository), repository) as tree:
        assert (tree / "fla/x.py").read_text() == "new\n"
    with checked_out(old, repository) as tree:
        assert (tree / "fla/x.py").read_text() == "older\n"
    with (
        pytest.raises(MeasurementError, match="neither a folder nor a commit"),
        checked_out("nonsense", repository),
    ):
        pass


def test_the_command_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such", "neither", "--repo", "/"]) == 1
    assert "Name the clone by --repo" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["a", "b", "--pairs", "1"])
