"""The command line of a case."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.__main__ import REMOVED, descriptions, main
from benchmarks.engine.commands import run_case
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Run, load
from tests.benchmarks.runs import run_of
from tests.processes import run_python


@pytest.fixture
def case() -> ModuleType:
    module = ModuleType("benchmarks.cases.made_up")

    def options(parser: ArgumentParser) -> None:
        parser.add_argument("--least", type=float, default=0.0)

    def measure(args: Namespace) -> Iterator[Run]:
        run = run_of("made_up")
        for number in range(2):
            run = run.adding(Entry(table="t", figures={"n": number}), least=args.least)
            yield run
            if args.least < 0:
                raise RuntimeError("the GPU is gone")

    vars(module).update(options=options, measure=measure, limits=lambda _: [Criterion("n", 1, 0)])
    return module


def test_the_file_is_written_and_misses_are_printed(case, tmp_path, capsys):
    out = tmp_path / "run.json"
    assert run_case(case, ["--out", str(out), "--least", "2"]) == 0
    assert load(out).settings == {"least": 2.0}
    printed = capsys.readouterr()
    assert printed.out == "misses its limit: n: 1, limit 0\n"
    assert [line.partition(" s  ")[2] for line in printed.err.splitlines()] == ["t: n 0", "t: n 1"]
    case.FAILS = True
    assert run_case(case, []) == 1


def test_an_interrupted_run_keeps_its_entries(case: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="gone"):
        run_case(case, ["--out", str(tmp_path / "run.json"), "--least", "-1"])
    assert len(load(tmp_path / "run.json").entries) == 1


def test_the_cases_are_listed_and_an_unknown_one_is_refused() -> None:
    listed = run_python("-m", "benchmarks", "--help").stdout
    for name in ("delta_rule", "layer", "operator"):
        assert f"\n  {name} " in listed
    assert "layer_calls" not in listed
    done = run_python("-m", "benchmarks", "no_such_case")
    assert done.returncode == 2
    assert "there is no case no_such_case" in done.stderr


def test_a_removed_case_names_its_replacement(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks", "gpu_tests", "--out", "old.json"])
    assert main() == 2
    assert "use python -m pytest tests/gpu --junitxml FILE" in capsys.readouterr().err
    assert not set(REMOVED) & set(descriptions())
