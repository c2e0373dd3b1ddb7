"""Comparisons of two trees: false differences under noise, and true ones."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.ab_compare import Comparison, block_printer, checked_out, main, plot, table
from harness.analysis.difference import (
    ERROR_RATE,
    MIN_BLOCKS,
    Block,
    Difference,
    difference,
    take_block,
)
from harness.measuring.runner import MeasurementError, Options
from harness.terminal import Progress
from tests import PROJECT
from tests.harness.samples import make_correctness, make_sample
from tests.repositories import commit, make_checkout

Noise = Callable[[random.Random, int], list[float]]
"""Returns the speed factors of a host in so many consecutive runs."""


def quiet(source: random.Random, runs: int) -> list[float]:
    return [math.exp(source.gauss(0, 0.01)) for _ in range(runs)]


def swings(source: random.Random, runs: int) -> list[float]:
    """The host is up to ten times slower for several consecutive runs."""
    factors: list[float] = []
    while len(factors) < runs:
        slower = source.choice([1.0, source.uniform(1, 10)])
        factors += [math.exp(source.gauss(0, 0.03)) / slower] * source.randint(1, 8)
    return factors[:runs]


@pytest.mark.parametrize("noise", [quiet, swings])
def test_few_of_all_possible_orders_report_a_difference(noise: Noise) -> None:
    """The error rate holds for any times, because only the order is random."""
    times = noise(random.Random(7), 3 * MIN_BLOCKS)
    blocks = [times[start : start + 3] for start in range(0, len(times), 3)]
    reported, without_control, total = 0, 0, 0
    for orders in itertools.product(itertools.permutations(range(3)), repeat=MIN_BLOCKS):
        result = difference(
            [Block(*(block[n] for n in order)) for block, order in zip(blocks, orders, strict=True)]
        )
        total += 1
        reported += result.faster or result.slower
        without_control += not result.low <= 1 <= result.high
    assert total == 6**MIN_BLOCKS
    assert without_control <= ERROR_RATE * total
    assert reported <= without_control


def test_the_figures_by_hand() -> None:
    blocks = [Block(100.0, 100.0 + 10 * n, 100.0 + n) for n in range(1, 6)]
    result = difference(blocks)
    ratios = sorted([b / a for a, b, _ in blocks] + [b / c for _, b, c in blocks])
    assert (result.low, result.high) == (ratios[0], ratios[-1])
    assert result.ratio == pytest.approx(statistics.median(ratios), rel=1e-3)
    assert result.control == pytest.approx(1.03)
    assert (result.a, result.b) == (100.5, 130.0)
    # with seven blocks, B need not be the fastest in each
    result = difference([*blocks, Block(100.0, 120.0, 100.0), Block(100.0, 120.0, 121.0)])
    assert result.faster
    assert result.low == ratios[0]


def test_a_difference_must_exceed_that_of_the_control() -> None:
    same = [Block(100.0, 130.0, 120.0)] * MIN_BLOCKS
    assert difference(same).low == pytest.approx(130 / 120)
    assert not difference(same).faster
    assert not difference([Block(130.0, 100.0, 113.0)] * MIN_BLOCKS).slower
    assert difference([Block(100.0, 130.0, 101.0)] * MIN_BLOCKS).faster
    assert difference([Block(130.0, 100.0, 129.0)] * MIN_BLOCKS).slower


def test_the_order_of_a_block_is_random() -> None:
    seen = set()
    for _ in range(200):
        order: list[str] = []

        def timer(name: str, order: list[str] = order) -> float:
            order.append(name)
            return float(len(order))

        block = take_block(lambda: timer("a"), lambda: timer("b"), random.SystemRandom())
        assert sorted(order) == ["a", "a", "b"]
        assert order[int(block.b) - 1] == "b"
        seen.add(tuple(block))
    assert len(seen) == 6


def test_each_block_is_printed_before_the_next_one_starts(capsys, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    printed: list[int] = []

    def timer(tree: Path, length: int, *_: Any, **options: Any) -> Any:
        assert not options["cross_check"]
        printed.append(capsys.readouterr().err.count("\n"))
        return make_sample(length, 100.0 if tree.name == "a" else 120.0)

    comparison = Comparison(
        blocks=5, checked=False, measure=timer, on_block=block_printer(Progress(), 5)
    )
    ((length, result),) = comparison.run(Path("a"), Path("b"), [512])
    assert printed == [0] * 3 + ([1] + [0] * 2) * 4
    assert capsys.readouterr().err == (
        "      512 tokens, block 5 of 5: A 100, B 120, A again 100 tokens/s\n"
    )
    assert length == 512
    assert result.ratio == pytest.approx(1.2)
    assert (result.a, result.b) == (100.0, 120.0)
    assert "| 512 | 100 | 120 | 1.200 | 1.200 to 1.200 | 1.000 |" in table([(length, result)])
    assert "| tokens | theirs, tokens/s | ours, tokens/s |" in table([], ("theirs", "ours"))


def test_an_overloaded_host_gives_a_warning(capsys, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for load, warned in ((2.0, False), (2.1, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        block_printer(Progress(), 5)
        shown = "warning: the load is 2.1 on 2 usable cores" in capsys.readouterr().err
        assert shown is warned


def test_wrong_results_end_the_comparison(tmp_path: Path) -> None:
    comparison = Comparison(check=lambda *_: make_correctness(passed=False))
    with pytest.raises(MeasurementError, match="wrong results: relative RMS error"):
        next(comparison.run(tmp_path, tmp_path, [512]))


KERNELS = {"fla/ops/quasar/chunk.py": "old\n", "fla/layers/quasar.py": "", "fla/__init__.py": ""}


def test_a_tree_is_a_folder_or_a_commit(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path / "clone", KERNELS)
    old = commit(repository, {"fla/layers/quasar.py": "older\n"})
    commit(repository, {"fla/layers/quasar.py": "new\n"})
    for name, content in ((str(repository), "new\n"), (old, "older\n")):
        with checked_out(name, repository) as tree:
            assert (tree / "fla/layers/quasar.py").read_text() == content
    for wrong, why in (("nonsense", r"nor a commit of .*: fatal"), ("HEAD:fla", "HEAD:fla has no")):
        with pytest.raises(MeasurementError, match=why), checked_out(wrong, repository):
            pass


def test_an_overlay_is_laid_over_the_installed_library() -> None:
    overlay = PROJECT / "quasar_kernels/overlay"
    for name in (str(overlay), "HEAD:quasar_kernels/overlay"):
        with checked_out(name, PROJECT) as tree:
            assert (tree / "fla/layers/quasar.py").is_file()
            assert (tree / "fla/utils").exists() or (tree / "fla/utils.py").exists()
        assert not tree.exists()


def test_wrong_arguments_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such", "neither", "--repo", "/"]) == 1
    assert "Name the clone by --repo" in capsys.readouterr().err
    assert main([str(PROJECT), str(PROJECT)]) == 1
    errors = capsys.readouterr().err
    assert f"{PROJECT} has no fla/ops/quasar/chunk.py. Name the root of a fork, or" in errors
    for wrong in (["--blocks", "4"], ["--lengths", "512,0"]):
        with pytest.raises(SystemExit):
            main(["a", "b", *wrong])
        assert wrong[0] in capsys.readouterr().err


def test_the_command_prints_and_writes_the_differences(tmp_path, monkeypatch, capsys):
    results = [(n, Difference(1.25, 1.125, 1.5, 1.01, 100.0 * n, 125.0 * n)) for n in (1, 512)]
    runs: list[Any] = []
    monkeypatch.setattr(Comparison, "run", lambda *given: runs.append(given) or results)
    a, b = (make_checkout(tmp_path / name, KERNELS) for name in "ab")
    options = "--lengths 1,512 --blocks 6 --device cpu --svg {0}/plot.svg --markdown {0}/table.md"
    assert main([str(a), str(b), *options.format(tmp_path).split()]) == 0
    assert runs == [(Comparison(Options("cpu"), 6), a, b, [1, 512])]
    assert capsys.readouterr().out == "".join(f"{n:>9} tokens: {one}\n" for n, one in results)
    assert (tmp_path / "plot.svg").read_text() == plot(results)
    assert (tmp_path / "table.md").read_text() == table(results)
    assert main([str(a), str(b), "--ungated", "--pairs", "9"]) == 0
    assert runs[1] == (Comparison(blocks=9, checked=False), a, b, [2048])
