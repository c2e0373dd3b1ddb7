"""scripts/measure.sh: one command for all figures of a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import PROJECT
from tests.processes import run

STEPS = (
    "gpu_tests.run",
    "layer.speed",
    "layer.training",
    "honesty.acceptance",
    "operator.inference",
    "operator.training",
    "delta_rule.speed",
    "wkv6.speed",
    "mechanisms.speed",
    "recall.train",
    "nsight.profile",
    "sanitizer.watch",
)
RECORD = """import pathlib, sys
name = __spec__.name.removeprefix("benchmarks.")
with open("steps", "a") as steps:
    print(name, *sys.argv[1:], file=steps)
sys.exit(name == {failing!r})
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a project whose measuring commands only record how they were called."""
    scripts = tmp_path / "project" / "scripts"
    scripts.mkdir(parents=True)
    shutil.copy(PROJECT / "scripts/measure.sh", scripts)
    for step in STEPS:
        path = Path("benchmarks", *step.split(".")).with_suffix(".py")
        assert (PROJECT / path).exists()
        stand_in = scripts.parent / path
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        # Python prefers the installed checkout's package to a folder without __init__.py.
        for folder in (stand_in.parent, stand_in.parent.parent):
            (folder / "__init__.py").touch()
        stand_in.write_text(RECORD.format(failing="operator.inference"))
    return scripts.parent


def measure(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "COMMIT": "abc"}
    return run(project / "scripts/measure.sh", *arguments, env=env)


def test_a_failing_step_costs_its_own_figures_alone(project, tmp_path):
    fork = tmp_path / "fork"
    (fork / "fla").mkdir(parents=True)
    done = measure(project, str(fork), "data")
    assert (done.returncode, done.stderr) == (1, "")
    called = [line.split() for line in (project / "steps").read_text().splitlines()]
    assert list(dict.fromkeys(name for name, *_ in called)) == list(STEPS)
    assert called[1][1:5] == ["--fork", str(fork), "--out", "data"]
    assert all(arguments[-2:] == ["--commit", "abc"] for arguments in called)
    assert (project / "data").is_dir()


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_fork_its_usage_is_said(project, arguments):
    done = measure(project, *arguments)
    assert (done.returncode, done.stderr) == (2, "usage: scripts/measure.sh FORK [FOLDER]\n")


def test_the_checkout_s_own_python_is_taken_where_there_is_one(project, tmp_path):
    own = project / ".venv/bin/python"
    own.parent.mkdir(parents=True)
    own.write_text(f'#!/bin/sh\ntouch own\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    (tmp_path / "fork/fla").mkdir(parents=True)
    measure(project, str(tmp_path / "fork"), "data")
    assert (project / "own").exists()
    assert (project / "steps").exists()


def test_a_folder_that_is_no_fork_is_named_with_the_remedy(project, tmp_path):
    done = measure(project, str(tmp_path))
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert "clone" in done.stderr
    assert not (project / "steps").exists()
