"""Mutants: which are made of a program, whether a test notices one, and what is kept of it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutants.page import section
from benchmarks.mutants.results import Left, Module, load, write
from tests import PROJECT

pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed: pip install -e '.[mutants]'")
from benchmarks.mutants import run
from benchmarks.mutants.making import mutants_of
from benchmarks.mutants.run import TESTS, chosen, mixed

SOURCE = """\
LIMIT = 3


def grade(value: float | None) -> str:
    if value is None:
        return "none"
    while value > LIMIT:
        value = value - 1
    return "good" if value == LIMIT else "bad"
"""


def test_every_mutant_is_another_program() -> None:
    made = mutants_of(SOURCE)
    programs = {ast.dump(ast.parse(one.code)) for one in made}
    assert len(programs) == len(made) > 20
    assert ast.dump(ast.parse(SOURCE)) not in programs
    for one in made:
        assert one.before in SOURCE
        assert " ".join(one.after.split()) in " ".join(one.code.split())
    assert not [one for one in made if one.line == 4], "annotations are no program"
    kinds = Counter(one.after for one in made if one.line == 5)
    assert set(kinds) == {"if value is not None:", "if not value is None:"}


def test_the_lines_of_a_mutant_are_those_of_its_statement() -> None:
    lines = {one.line: one.lines for one in mutants_of(SOURCE)}
    assert lines == {1: None, 5: (5, 5), 7: (7, 7), 8: (8, 8), 9: (9, 9)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What came of five mutants of the program above, with tests that leave gaps."""
    tree = tmp_path_factory.mktemp("mutants") / "tree"
    tree.mkdir()
    (tree / "grades.py").write_text(SOURCE)
    (tree / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tree / "test_grades.py").write_text(
        "import pytest\n"
        "from grades import LIMIT, grade\n\n"
        '@pytest.fixture(scope="module")\n'
        "def none():\n"
        "    return grade(None)\n\n"
        '@pytest.mark.parametrize("value", [LIMIT + 1])\n'
        "def test_high(value):\n"
        '    assert grade(value) == "good"\n\n'
        "def test_same(none):\n"
        "    assert none is none\n\n"
        "def test_none(none):\n"
        '    assert none == "none"\n'
    )
    changes = [
        ("value is None", "value is not None", (5, 5)),
        ('"bad"', '"ill"', (9, 9)),  # a gap
        ("LIMIT = 3", "LIMIT = 4", None),  # no test knows the number, but one has it in its name
        ("value - 1", "__import__('time').sleep(3600)", (8, 8)),  # takes too long
        ("def grade", "def grades", None),  # cannot be imported
    ]
    job: dict[str, Any] = {
        "paths": ["grades.py"],
        "tests": ["test_grades.py"],
        "limit": 600,
        "timeout": 5,
    }
    job["mutants"] = [
        {"path": "grades.py", "code": SOURCE.replace(old, new), "lines": lines}
        for old, new, lines in changes
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mutants.trying"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
             "PYTEST_PLUGINS": "pytest_cov.plugin,pytest_timeout"},
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    assert (tree / "grades.py").read_text() == SOURCE
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_a_test_notices_is_told_with_its_name(answers: list[dict]) -> None:
    assert [one["status"] for one in answers] == [1, 0, 0, 1, 2]
    assert [one["tests"] for one in answers] == [3, 1, 3, 1, 3]
    (failed,) = answers[0]["failed"]  # the first that fails is the last that runs
    assert failed in ("test_grades.py::test_none", "test_grades.py::test_same")
    assert answers[3]["failed"] == ["test_grades.py::test_high[4]"]


def module(path: str, tried: int, *left: Left) -> Module:
    today = date(2026, 1, 1)
    return Module(path=path, created=today, commit=None, seed=1, made=100, tried=tried, left=left)


def test_a_reason_is_kept_where_the_same_mutant_is_left_again(tmp_path: Path) -> None:
    file = tmp_path / "mutants.json"
    same = Left(operator="A", line=3, before="a > 0", after="a != 0")
    write(module("x.py", 10, same.model_copy(update={"equivalent": "it is never below"})), file)
    write(module("a.py", 10), file)
    gap = Left(operator="A", line=9, before="b", after="c")
    write(module("x.py", 20, same.model_copy(update={"line": 4}), gap), file)
    first, second = load(file).modules
    assert (first.path, second.path, second.tried) == ("a.py", "x.py", 20)
    assert [(one.line, one.equivalent) for one in second.left] == [
        (4, "it is never below"),
        (9, ""),
    ]
    assert (second.noticed, second.equivalent) == (18, 1)
    text = section(load(file))
    assert "| x.py | 100 | 20 (20%) | 18 | 1 | 94.7% |" in text
    assert "| a.py | 100 | 10 (10%) | 10 | 0 | 100.0% |" in text
    assert "15% of these modules' mutants were tried." in text
    assert "28 of 30 are noticed, 93.3%; 1 of the 2 that are left change nothing" in text
    assert "| x.py:9 | `b` | `c` | **a gap** |" in text


def test_more_begins_where_the_tries_before_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mutants.json"
    every = mutants_of(SOURCE)
    whole = {"seed": 1, "most": None, "left": False}
    order = chosen("x.py", every, Namespace(**whole, more=False))
    gap = Left(operator="A", line=order[2].line, before=order[2].before, after=order[2].after)
    write(module("x.py", 5, gap).model_copy(update={"made": len(every)}), file)
    monkeypatch.setattr(run, "load", lambda: load(file))
    assert chosen("x.py", every, Namespace(**whole, more=True)) == order[5:]
    assert chosen("x.py", every, Namespace(**{**whole, "most": 3}, more=True)) == order[5:8]
    with pytest.raises(SystemExit, match="has changed"):
        chosen("x.py", every[1:], Namespace(**whole, more=True))
    with pytest.raises(SystemExit, match="has changed"):
        chosen("x.py", every, Namespace(**{**whole, "seed": 2}, more=True))
    write(module("x.py", 2, gap).model_copy(update={"made": len(every)}), file)
    with pytest.raises(SystemExit, match="has changed"):  # what was left is not among the first
        chosen("x.py", every, Namespace(**whole, more=True))
    write(module("x.py", 5, gap).model_copy(update={"made": len(every)}), file)
    changed = [one._replace(after="") if one == order[2] else one for one in every]
    with pytest.raises(SystemExit, match="has changed"):
        chosen("x.py", changed, Namespace(**whole, more=True))


def test_modules_are_mixed_and_each_keeps_its_order() -> None:
    every = mutants_of(SOURCE)
    both = mixed({"a": every, "b": every[:5]}, 1)
    assert [one for path, one in both if path == "a"] == every
    assert [one for path, one in both if path == "b"] == every[:5]
    assert {path for path, _ in both[:10]} == {"a", "b"}


def test_every_module_and_every_test_is_there() -> None:
    for path, tests in TESTS.items():
        assert all((PROJECT / one).exists() for one in (path, *tests))
    assert {one.path for one in load().modules} <= set(TESTS)
