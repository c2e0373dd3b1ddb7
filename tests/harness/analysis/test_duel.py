"""Two trees timed in turns: what their pairs say, and where trees come from."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.duel import Difference, Duel, checked_out, difference, main, plot, table
from harness.measuring.runner import MeasurementError
from tests import PROJECT
from tests.harness.samples import gate_result, measurement
from tests.repositories import commit, make_checkout


def test_the_interval_by_hand() -> None:
    found = difference([(100.0, 110.0), (100.0, 121.0)])
    half = 12.70620 * math.log(1.1) / 2  # the half width of two logarithms ln 1.1 apart
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


@pytest.mark.parametrize(
    "pairs", [[], [(1.0, 1.0)], [(1.0, 0.0)] * 3, [(-1.0, -1.0)] * 3, [(1.0, math.nan)] * 3]
)
def test_what_is_no_data_is_refused(pairs: Any) -> None:
    with pytest.raises(ValueError, match=r"pairs|positive"):
        difference(pairs)


def test_both_take_turns_in_being_first() -> None:
    order: list[str] = []

    def timer(tree: Path, length: int, *, gate: Any, **_options: Any) -> Any:
        assert gate is False
        order.append(tree.name)
        return measurement(length, 100.0 if tree.name == "a" else 120.0)

    duel = Duel(pairs=3, gated=False, timer=timer)
    ((length, found),) = duel.run(Path("a"), Path("b"), [512])
    assert length == 512
    assert found.ratio == pytest.approx(1.2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert (found.a, found.b) == (100.0, 120.0)
    assert "| 512 | 100 | 120 | 1.200 | 1.200 to 1.200 |" in table([(length, found)])
    assert "| tokens | theirs, tokens/s | ours, tokens/s |" in table([], ("theirs", "ours"))
    drawn = plot([(1024, found), (length, found)], ("theirs", "ours"))
    assert drawn.index(">theirs</text>") < drawn.index(">ours</text>")
    assert drawn == plot([(length, found), (1024, found)], ("theirs", "ours"))
    assert ">theirs and ours</text>" in drawn
    dashed = [line for line in drawn.splitlines() if "dasharray" in line]
    assert any("#999999" in line for line in dashed)
    assert not any("#0b6e4f" in line for line in dashed)


def test_a_tree_beside_itself_shows_the_noise() -> None:
    speeds = iter([100.0, 120.0, 90.0, 110.0])
    duel = Duel(
        pairs=2, gated=False, timer=lambda tree, length, **_: measurement(length, next(speeds))
    )
    ((_, found),) = duel.run(Path("a"), Path("a"), [512])
    assert found == difference([(100.0, 120.0), (110.0, 90.0)])


@pytest.mark.parametrize(
    ("ratio", "low", "high", "said"),
    [
        (1.25, 1.125, 1.5, "B is faster: +25.00% (95% interval +12.50% to +50.00%)"),
        (0.75, 0.5, 0.875, "B is slower: -25.00% (95% interval -50.00% to -12.50%)"),
        (
            0.5,
            0.25,
            1.0,
            "no difference beyond the noise: -50.00% (95% interval -75.00% to +0.00%)",
        ),
        (
            1.25,
            1.0,
            1.5,
            "no difference beyond the noise: +25.00% (95% interval +0.00% to +50.00%)",
        ),
    ],
)
def test_what_a_difference_says(ratio: float, low: float, high: float, said: str) -> None:
    assert str(Difference(ratio, low, high, 1.0, ratio)) == said


def test_the_gate_and_the_timer_are_given_what_the_comparison_is(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []

    def checker(*_: Any, **options: Any) -> Any:
        given.append(options)
        return gate_result()

    def timer(tree: Path, length: int, **options: Any) -> Any:
        given.append(options)
        return measurement(length, 1.0)

    stop = threading.Event()
    duel = Duel("cpu", 2, 60.0, timer=timer, checker=checker, stop=stop)
    assert len(list(duel.run(tmp_path / "a", tmp_path / "b", [512, 1024]))) == 2
    shared = {"device": "cpu", "timeout": 60.0, "stop": stop}
    gate = gate_result()
    assert given == [shared] * 2 + [{**shared, "gate": gate, "cold_cache": False}] * 8


def test_a_red_gate_ends_the_comparison(tmp_path: Path) -> None:
    checks = tuple(
        gate_result(passed=False).checks[0].model_copy(update={"name": n}) for n in "abcd"
    )
    red = gate_result(passed=False, checks=checks)
    duel = Duel(pairs=2, checker=lambda *_, **__: red)
    with pytest.raises(MeasurementError, match=r"wrong results: a .*; b .*; c [^;]*$"):
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
        pytest.raises(MeasurementError, match=r"neither a folder nor a commit of .*: fatal"),
        checked_out("nonsense", repository),
    ):
        pass


def test_the_command_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such", "neither", "--repo", "/"]) == 1
    assert "Name the clone by --repo" in capsys.readouterr().err
    for wrong in (["--pairs", "1"], ["--lengths", "0"], ["--lengths", "512,0"], ["--lengths", "x"]):
        with pytest.raises(SystemExit):
            main(["a", "b", *wrong])
        assert wrong[0] in capsys.readouterr().err


def test_the_command_line_prints_and_writes_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [(n, Difference(1.25, 1.125, 1.5, 100.0 * n, 125.0 * n)) for n in (1, 512)]
    made: list[Duel] = []
    seen: list[Any] = []

    def run(duel: Duel, *what: Any) -> Any:
        made.append(duel)
        seen.extend(what)
        return found

    monkeypatch.setattr(Duel, "run", run)
    files = ["--svg", str(tmp_path / "plot.svg"), "--markdown", str(tmp_path / "table.md")]
    trees = [str(tmp_path), str(PROJECT)]
    assert main([*trees, "--lengths", "1,512", "--pairs", "2", "--device", "cpu", *files]) == 0
    assert seen == [tmp_path, PROJECT, [1, 512]]
    assert made == [Duel("cpu", 2)]
    assert capsys.readouterr().out == "".join(f"{n:>9} tokens: {one}\n" for n, one in found)
    assert (tmp_path / "plot.svg").read_text() == plot(found)
    assert (tmp_path / "table.md").read_text() == table(found)
    assert main([*trees, "--ungated"]) == 0
    assert (made[1], seen[-1]) == (Duel(gated=False), [2048])
