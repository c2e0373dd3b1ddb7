"""`--help` of every command: with the base dependencies alone, and fast where people use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import PROJECT
from tests.processes import run_python

COMMANDS = ("compare", "history", "profile", "gates")
INTERNAL = {
    "harness.worker": "the harness starts it with a job on stdin",
    "harness.worker.subject.profile": "`harness profile` prints its command line",
    "neurons.runtime.identity": "a child of the miner",
    "neurons.runtime.child": "runs another module",
    "benchmarks.cases.validator_loop": "a validator's script, as it is",
    "benchmarks.engine.processes": "calls a function for another command",
}
"""Modules that no person starts, or not with the base dependencies, and why."""
TORCH_IS_IMPORTED = ("benchmarks",)
"""Where options are made of what needs torch; these commands are for developers with a GPU."""

OPTIONAL = {"optuna", "prometheus_client", "psycopg", "pytest"}
HEAVY = {"bittensor", "fla", "torch", "transformers"}
SERVICES = {
    *("alembic", "click", "dotenv", "fastapi", "git", "httpx", "jinja2", "sqlalchemy", "stamina"),
    *("structlog", "uvicorn"),
}
"""What the extras of the miner and the servers bring, which the library works without."""
LIBRARY = ("harness", "quasar_kernels", *COMMANDS, "scripts/step2", "scripts/record", "scripts/gpu")

HIDING = """
import sys


class Hidden:
    names = {names!r}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None


sys.meta_path.insert(0, Hidden())
"""


def modules() -> list[str]:
    """Return every module of the project that `python -m` starts, unless it is internal."""
    found = []
    for root in ("harness", "neurons", "quasar_kernels", "benchmarks"):
        for path in sorted((PROJECT / root).rglob("*.py")):
            if "overlay" not in path.parts and '\nif __name__ == "__main__":' in path.read_text():
                name = ".".join(path.relative_to(PROJECT).with_suffix("").parts)
                found.append(name.removesuffix(".__main__"))
    return [name for name in found if name not in INTERNAL]


def cases() -> list[str]:
    """Return the cases of the benchmarks."""
    files = sorted((PROJECT / "benchmarks/cases").glob("*.py"))
    return [path.stem for path in files if "\ndef measure(" in path.read_text()]


SCRIPTS = [f"scripts/{path.name}" for path in sorted((PROJECT / "scripts").glob("*.py"))]
LINES = [
    *([script] for script in SCRIPTS),
    *(["-m", "harness", command] for command in COMMANDS),
    *(["-m", module] for module in modules()),
]


def test_the_commands_of_the_harness_are_these() -> None:
    done = run_python("-m", "harness", "no-such-command")
    assert done.stderr.rstrip().endswith("must be one of schema, " + ", ".join(COMMANDS))


ALL_CASES = """
import sys

from benchmarks.__main__ import main

for case in sys.argv[1:]:
    sys.argv = ["benchmarks", case, "--help"]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def run_with_base_dependencies(line: list[str], folder: Path, *, torch: bool) -> str:
    """Run Python where packages that the line does without are hidden; return what it prints."""
    hidden = OPTIONAL if torch else OPTIONAL | HEAVY
    if any(argument.startswith(LIBRARY) for argument in line):
        hidden = hidden | SERVICES
    (folder / "sitecustomize.py").write_text(HIDING.format(names=hidden))
    before = {path.name for path in PROJECT.iterdir()}
    paths = os.pathsep.join([str(folder), str(PROJECT)])
    done = run_python(*line, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert {path.name for path in PROJECT.iterdir()} == before
    return done.stdout


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_help_needs_the_base_dependencies_alone(line: list[str], tmp_path: Path) -> None:
    torch = line[-1].startswith(TORCH_IS_IMPORTED)
    output = run_with_base_dependencies([*line, "--help"], tmp_path, torch=torch)
    assert output.lower().startswith("usage: "), output


def test_help_of_every_case_of_the_benchmarks(tmp_path: Path) -> None:
    """In one process, as each would import torch again."""
    output = run_with_base_dependencies(["-c", ALL_CASES, *cases()], tmp_path, torch=True)
    assert [case for case in cases() if f"usage: python -m benchmarks {case} " not in output] == []
