"""Two trees compared: how often noise alone looks like a difference, and which ones are found."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.ab_compare import (
    BLOCKS,
    BlockPrinter,
    Comparison,
    checked_out,
    main,
    overload,
    plot,
    table,
)
from harness.analysis.difference import (
    ERROR_RATE,
    LEAST_BLOCKS,
    Block,
    Difference,
    difference,
    take_block,
)
from harness.measuring.runner import MeasurementError, Options
from harness.terminal import Progress
from quasar_kernels.line_plot import GREEN, GREY
from tests import PROJECT
from tests.harness.samples import make_correctness, make_sample
from tests.repositories import commit, make_checkout

Noise = Callable[[random.Random, int], list[float]]
"""Speed factors of so many runs in a row, as a host gives them to any code."""


def quiet(source: random.Random, runs: int) -> list[float]:
    return [math.exp(source.gauss(0, 0.01)) for _ in range(runs)]


def swings(source: random.Random, runs: int) -> list[float]:
    """The host is up to ten times slower, for several runs at a time."""
    factors: list[float] = []
    while len(factors) < runs:
        slower = source.choice([1.0, source.uniform(1, 10)])
        factors += [math.exp(source.gauss(0, 0.03)) / slower] * source.randint(1, 8)
    return factors[:runs]


def heavy_tails(source: random.Random, runs: int) -> list[float]:
    """Each run is like the last, with steps of a distribution without variance."""
    logs, log = [], 0.0
    for _ in range(runs):
        log = 0.9 * log + 0.2 * math.tan(math.pi * (source.random() - 0.5))
        logs.append(max(-6.0, min(6.0, log)))
    return [math.exp(log) for log in logs]


def drift(source: random.Random, runs: int) -> list[float]:
    slope = source.gauss(0, 1.5) / runs
    return [math.exp(slope * n + source.gauss(0, 0.02)) for n in range(runs)]


def one_slow_process(source: random.Random, runs: int) -> list[float]:
    factors = quiet(source, runs)
    factors[source.randrange(runs)] /= 10
    return factors


def in_turns(source: random.Random, runs: int) -> list[float]:
    """Every third run is slower: the period of the blocks themselves."""
    first = source.randrange(3)
    return [f / (3 if n % 3 == first else 1) for n, f in enumerate(quiet(source, runs))]


HOSTS: list[Noise] = [quiet, swings, heavy_tails, drift, one_slow_process, in_turns]


def compared(noise: Noise, gain: float, blocks: int, seed: int) -> Difference:
    """Compare trees whose true ratio is `gain` on a host that `noise` describes."""
    source = random.Random(f"{noise.__name__} {gain} {blocks} {seed}")
    factors = iter(noise(source, 3 * blocks))
    taken = [
        take_block(lambda: next(factors), lambda: gain * next(factors), source)
        for _ in range(blocks)
    ]
    return difference(taken)


@pytest.mark.parametrize("blocks", [LEAST_BLOCKS, BLOCKS, 12])
@pytest.mark.parametrize("noise", HOSTS)
def test_a_tree_beside_itself_is_no_winner(noise: Noise, blocks: int) -> None:
    found = [compared(noise, 1.0, blocks, seed) for seed in range(1000)]
    per_hundred = [
        sum(one.faster or one.slower for one in found[start : start + 100])
        for start in range(0, 1000, 100)
    ]
    assert max(per_hundred) <= 2, per_hundred
    assert sum(per_hundred) <= 1000 * ERROR_RATE, per_hundred


@pytest.mark.parametrize("noise", HOSTS)
def test_over_all_orders_that_may_be_drawn_few_report_a_difference(noise: Noise) -> None:
    """The promise holds for any given times: it rests on the order alone."""
    times = noise(random.Random(7), 3 * LEAST_BLOCKS)
    blocks = [times[start : start + 3] for start in range(0, len(times), 3)]
    reported, without_control, total = 0, 0, 0
    for orders in itertools.product(itertools.permutations(range(3)), repeat=LEAST_BLOCKS):
        given = [
            Block(*(block[n] for n in order)) for block, order in zip(blocks, orders, strict=True)
        ]
        found = difference(given)
        total += 1
        reported += found.faster or found.slower
        without_control += not found.low <= 1 <= found.high
    assert total == 6**LEAST_BLOCKS
    assert without_control <= ERROR_RATE * total
    assert reported <= without_control


@pytest.mark.parametrize(
    ("noise", "gain", "blocks", "least"),
    [
        (quiet, 1.20, LEAST_BLOCKS, 100),
        (quiet, 1 / 1.20, LEAST_BLOCKS, 100),
        (quiet, 1.05, LEAST_BLOCKS, 95),
        (quiet, 1.05, BLOCKS, 98),
        (quiet, 1.02, 20, 90),
        (one_slow_process, 1.20, 10, 98),
        (drift, 1.20, 12, 90),
        (swings, 1.20, 12, 75),
    ],
)
def test_a_real_difference_is_found(noise: Noise, gain: float, blocks: int, least: int) -> None:
    found = [compared(noise, gain, blocks, seed) for seed in range(100)]
    right = sum(one.faster if gain > 1 else one.slower for one in found)
    wrong = sum(one.slower if gain > 1 else one.faster for one in found)
    assert (right >= least, wrong) == (True, 0), right
    assert sum(one.low <= gain <= one.high for one in found) >= 97


def test_the_figures_by_hand() -> None:
    blocks = [Block(100.0, 100.0 + 10 * n, 100.0 + n) for n in range(1, 6)]
    found = difference(blocks)
    ratios = sorted([b / a for a, b, _ in blocks] + [b / c for _, b, c in blocks])
    assert (found.low, found.high) == (ratios[0], ratios[-1])
    assert found.ratio == pytest.approx(statistics.median(ratios), rel=1e-3)
    assert found.control == pytest.approx(1.03)
    assert (found.a, found.b) == (100.5, 130.0)
    # of seven blocks, one in which B was second leaves the verdict possible
    found = difference([*blocks, Block(100.0, 120.0, 100.0), Block(100.0, 120.0, 121.0)])
    assert found.faster
    assert found.low == ratios[0]


def test_what_the_control_reaches_is_no_difference() -> None:
    same = [Block(100.0, 130.0, 120.0)] * LEAST_BLOCKS
    assert difference(same).low == pytest.approx(130 / 120)
    assert not difference(same).faster
    assert not difference([Block(130.0, 100.0, 113.0)] * LEAST_BLOCKS).slower
    assert difference([Block(100.0, 130.0, 101.0)] * LEAST_BLOCKS).faster
    assert difference([Block(130.0, 100.0, 129.0)] * LEAST_BLOCKS).slower


@pytest.mark.parametrize(
    "blocks",
    [
        [],
        [Block(1.0, 2.0, 1.0)] * (LEAST_BLOCKS - 1),
        [Block(1.0, 0.0, 1.0)] * LEAST_BLOCKS,
        [Block(1.0, 1.0, -1.0)] * LEAST_BLOCKS,
        [Block(math.nan, 1.0, 1.0)] * LEAST_BLOCKS,
    ],
)
def test_what_is_no_data_is_refused(blocks: list[Block]) -> None:
    with pytest.raises(ValueError, match=r"blocks|positive"):
        difference(blocks)


def test_the_order_of_a_block_is_drawn() -> None:
    seen = set()
    for _ in range(200):
        order: list[str] = []
        times = iter([1.0, 2.0, 3.0])

        def timer(name: str, order: list[str] = order, times: Any = times) -> float:
            order.append(name)
            return float(next(times))

        block = take_block(lambda: timer("a"), lambda: timer("b"), random.SystemRandom())
        assert sorted(order) == ["a", "a", "b"]
        assert order[int(block.b) - 1] == "b"
        seen.add(tuple(block))
    assert len(seen) == 6


def test_each_block_is_printed_before_the_next_one_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    printed: list[int] = []

    def timer(tree: Path, length: int, *_: Any, **options: Any) -> Any:
        assert not options["cross_check"]
        printed.append(capsys.readouterr().err.count("\n"))
        return make_sample(length, 100.0 if tree.name == "a" else 120.0)

    comparison = Comparison(
        blocks=5, checked=False, measure=timer, on_block=BlockPrinter(Progress(), 5)
    )
    ((length, found),) = comparison.run(Path("a"), Path("b"), [512])
    assert printed == [0] * 3 + ([1] + [0] * 2) * 4
    assert capsys.readouterr().err == (
        "      512 tokens, block 5 of 5: A 100, B 120, A again 100 tokens/s\n"
    )
    assert length == 512
    assert found.ratio == pytest.approx(1.2)
    assert (found.a, found.b) == (100.0, 120.0)
    assert "| 512 | 100 | 120 | 1.200 | 1.200 to 1.200 | 1.000 |" in table([(length, found)])
    assert "| tokens | theirs, tokens/s | ours, tokens/s |" in table([], ("theirs", "ours"))
    drawn = plot([(1024, found), (length, found)], ("theirs", "ours"))
    assert drawn.index(">theirs</text>") < drawn.index(">ours</text>")
    assert drawn == plot([(length, found), (1024, found)], ("theirs", "ours"))
    assert ">theirs and ours</text>" in drawn
    dashed = [line for line in drawn.splitlines() if "line dashed" in line]
    assert any(GREY in line for line in dashed)
    assert not any(GREEN in line for line in dashed)


def test_an_overloaded_host_is_warned_of_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    loads = iter([2.0, 4.0, 4.1, 9.0])
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    printer = BlockPrinter(Progress(), 5)
    assert capsys.readouterr().err == ""
    for number, warned in ((1, False), (2, True), (3, False)):  # its own worker uses both cores
        printer(64, number, Block(1.0, 1.0, 1.0))
        assert ("warning: the load is 4.1 on 2 usable cores" in capsys.readouterr().err) is warned
    assert next(loads) == 9.0
    monkeypatch.setattr(os, "getloadavg", lambda: (2.1, 0.0, 0.0))
    assert "the load is 2.1 on 2 usable cores" in overload()


@pytest.mark.parametrize(
    ("ratio", "low", "high", "said"),
    [
        (1.25, 1.125, 1.5, "B is faster: +25.00% (99% interval +12.50% to +50.00%; "),
        (0.75, 0.5, 0.875, "B is slower: -25.00% (99% interval -50.00% to -12.50%; "),
        (0.5, 0.25, 1.0, "no difference beyond the noise: -50.00% (99% interval -75.00% to +0.00%"),
        (1.5, 1.015, 2.0, "no difference beyond the noise: +50.00% (99% interval +1.50% to +100.0"),
    ],
)
def test_what_a_difference_says(ratio: float, low: float, high: float, said: str) -> None:
    for control, shown in ((1 / 1.02, "-1.96%"), (1.02, "+2.00%")):
        text = str(Difference(ratio, low, high, control, 1.0, ratio))
        assert text.startswith(said)
        assert text.endswith(f"A against itself {shown})")


def test_the_check_and_the_timed_processes_get_the_comparisons_options(tmp_path: Path) -> None:
    received: list[Any] = []

    def checker(*arguments: Any, **_: Any) -> Any:
        received.append(arguments)
        return make_correctness(longest=1024)

    def timer(*arguments: Any, **more: Any) -> Any:
        received.append((*arguments, more["cross_check"]))
        return make_sample(arguments[1], 1.0)

    options, a, b = Options("cpu", 60.0, threading.Event()), tmp_path / "a", tmp_path / "b"
    comparison = Comparison(options, 5, measure=timer, check=checker)
    assert len(list(comparison.run(a, b, [512, 1024]))) == 2
    assert received[:2] == [(a, 1024, options), (b, 1024, options)]
    timed = [(tree, n, options, True) for n in (512, 1024) for tree in (a, a, b) * 5]
    assert sorted(received[2:], key=str) == sorted(timed, key=str)


def test_wrong_results_end_the_comparison(tmp_path: Path) -> None:
    checks = tuple(
        make_correctness(passed=False).checks[0].model_copy(update={"name": n}) for n in "abcd"
    )
    red = make_correctness(passed=False, checks=checks)
    comparison = Comparison(check=lambda *_: red)
    with pytest.raises(MeasurementError, match=r"wrong results: a .*; b .*; c [^;]*$"):
        next(comparison.run(tmp_path, tmp_path, [512]))


KERNELS = {"fla/ops/quasar/chunk.py": "old\n", "fla/layers/quasar.py": "", "fla/__init__.py": ""}


def test_a_tree_is_a_folder_or_a_commit(tmp_path: Path) -> None:
    repository = make_checkout(tmp_path / "clone", KERNELS)
    old = commit(repository, {"fla/layers/quasar.py": "older\n"})
    commit(
        repository,
        {"fla/layers/quasar.py": "new\n", **{f"deep/{n}": t for n, t in KERNELS.items()}},
    )
    with checked_out(str(repository), repository) as tree:
        assert (tree / "fla/layers/quasar.py").read_text() == "new\n"
        assert tree == repository
    with checked_out(old, repository) as tree:
        assert (tree / "fla/layers/quasar.py").read_text() == "older\n"
    with checked_out("HEAD:deep", repository) as tree:
        assert (tree / "fla/layers/quasar.py").read_text() == ""
    for wrong, why in (
        ("nonsense", r"neither a folder nor a commit of .*: fatal"),
        ("HEAD:deep/fla", r"HEAD:deep/fla has no fla/ops/quasar/chunk.py"),
    ):
        with pytest.raises(MeasurementError, match=why), checked_out(wrong, repository):
            pass


def test_an_overlay_is_laid_over_the_installed_library() -> None:
    overlay = PROJECT / "quasar_kernels/overlay"
    with checked_out(str(overlay), PROJECT) as tree:
        for name in ("fla/ops/quasar/chunk.py", "fla/layers/quasar.py"):
            assert (tree / name).read_bytes() == (overlay / name).read_bytes()
        assert (tree / "fla/utils").exists() or (tree / "fla/utils.py").exists()
        copy = tree
    assert not copy.exists()
    with checked_out("HEAD:quasar_kernels/overlay", PROJECT) as tree:
        assert (tree / "fla/__init__.py").is_file()


def test_the_command_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such", "neither", "--repo", "/"]) == 1
    assert "Name the clone by --repo" in capsys.readouterr().err
    assert main([str(PROJECT), str(PROJECT)]) == 1
    said = capsys.readouterr().err
    assert f"{PROJECT} has no fla/ops/quasar/chunk.py. Name the root of a fork, or" in said
    for wrong in (
        ["--blocks", "4"],
        ["--lengths", "0"],
        ["--lengths", "512,0"],
        ["--lengths", "x"],
    ):
        with pytest.raises(SystemExit):
            main(["a", "b", *wrong])
        assert wrong[0] in capsys.readouterr().err


def test_the_command_line_prints_and_writes_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [(n, Difference(1.25, 1.125, 1.5, 1.01, 100.0 * n, 125.0 * n)) for n in (1, 512)]
    made: list[Comparison] = []
    seen: list[Any] = []

    def run(comparison: Comparison, *what: Any) -> Any:
        made.append(comparison)
        seen.extend(what)
        return found

    monkeypatch.setattr(Comparison, "run", run)
    a, b = (make_checkout(tmp_path / name, KERNELS) for name in "ab")
    files = ["--svg", str(tmp_path / "plot.svg"), "--markdown", str(tmp_path / "table.md")]
    trees = [str(a), str(b)]
    assert main([*trees, "--lengths", "1,512", "--blocks", "6", "--device", "cpu", *files]) == 0
    assert seen == [a, b, [1, 512]]
    assert made == [Comparison(Options("cpu"), 6)]
    assert capsys.readouterr().out == "".join(f"{n:>9} tokens: {one}\n" for n, one in found)
    assert (tmp_path / "plot.svg").read_text() == plot(found)
    assert (tmp_path / "table.md").read_text() == table(found)
    assert main([*trees, "--ungated", "--pairs", "9"]) == 0
    assert (made[1], seen[-1]) == (Comparison(blocks=9, checked=False), [2048])
