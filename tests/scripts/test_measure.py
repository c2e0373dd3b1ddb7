"""scripts/measure.sh runs all measurements of a GPU."""

import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.cases.trees import TREES
from tests import PROJECT
from tests.processes import run

RECORD = """import sys
with open("steps", "a") as steps:
    print(*sys.argv[1:], file=steps)
sys.exit(sys.argv[1] == "operator")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a project whose measuring commands only record how they were called."""
    scripts = tmp_path / "project" / "scripts"
    scripts.mkdir(parents=True)
    shutil.copy(PROJECT / "scripts/measure.sh", scripts)
    tests = scripts.parent / "tests/gpu"
    tests.mkdir(parents=True)
    (tests / "test_fails.py").write_text("def test_fails():\n    assert not 1\n")
    package = scripts.parent / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(RECORD)
    return scripts.parent


def measure(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "COMMIT": "abc"}
    return run(project / "scripts/measure.sh", *arguments, env=env)


def test_all_steps_run_although_one_fails(project: Path, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    (fork / "fla").mkdir(parents=True)
    done = measure(project, str(fork), "data")
    assert (done.returncode, done.stderr) == (1, "")
    called = [line.split() for line in (project / "steps").read_text().splitlines()]
    names = [name for name, *_ in called]
    assert all((PROJECT / f"benchmarks/cases/{name}.py").exists() for name in names)
    assert names[-1] == "mechanisms"  # although `operator` has failed
    accuracy = ["layer_accuracy", "--out", "data/layer-accuracy.json", "--fork", str(fork)]
    assert called[0][:5] == accuracy
    report = ElementTree.parse(project / "data/gpu-tests.xml")  # noqa: S314 # pytest wrote it
    (counts,) = report.getroot()
    assert (counts.get("tests"), counts.get("failures")) == ("1", "1")
    (layer,) = [line for line in called if line[0] == "layer"]  # in one run, to be comparable
    assert layer[layer.index("--tree") + 1 : -2] == list(TREES)
    assert layer[1:3] == ["--out", "data/{}.json"]
    assert all(arguments[-2:] == ["--commit", "abc"] for arguments in called)
    assert (project / "data").is_dir()


def test_a_missing_fork_is_reported(project: Path, tmp_path: Path) -> None:
    for arguments in ([], ["--help"]):
        done = measure(project, *arguments)
        assert (done.returncode, done.stderr) == (2, "usage: scripts/measure.sh FORK [FOLDER]\n")
    done = measure(project, str(tmp_path))
    assert (done.returncode, f"{tmp_path} lacks the folder fla: clone" in done.stderr) == (2, True)
    assert not (project / "steps").exists()
