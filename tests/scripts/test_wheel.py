"""The wheel: its content, and its use with only its own dependencies."""

import json
import re
import shutil
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import harness
import quasar_kernels
from quasar_kernels.contract import overlay_files
from tests import PROJECT
from tests.processes import run, run_python
from tests.test_help import HIDING, OPTIONAL, SERVICES

SOURCES = ("harness", "quasar_kernels", "neurons", "benchmarks", "scripts", "tests/scripts")
FILES = ("pyproject.toml", "README.md", "LICENSE")
HIDDEN = {
    *("neurons", "benchmarks", "tests", "bittensor", "transformers"),
    *(OPTIONAL | SERVICES - {"jinja2"}),  # torch requires jinja2
}
"""What a user of the library has not installed."""

USE = """
import importlib, json, pkgutil
import torch
import harness, quasar_kernels
from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_recurrence
for package in (harness, quasar_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        # the overlay is imported as part of `fla`; under its own name it is data
        if ".overlay" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
mount()
import fla.layers.quasar, fla.ops.quasar
from fla.ops.quasar import chunk_quasar
torch.manual_seed(0)
q, k, v = (torch.randn(2, 100, 2, 32) for _ in range(3))
beta = torch.rand(2) + 0.5
o, state = chunk_quasar(q, k, v, beta, output_final_state=True)
exact, exact_state = quasar_recurrence(q, k, v, beta)
worst = [float((a - b).norm() / b.norm()) for a, b in ((o, exact), (state, exact_state))]
print(json.dumps([harness.__file__, fla.ops.quasar.__file__, max(worst)]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources by the installed build backend."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copytree(PROJECT / name, folder / "source" / name)
    for name in FILES:
        shutil.copy(PROJECT / name, folder / "source")
    byte_code = folder / "source/quasar_kernels/overlay/fla/ops/quasar/__pycache__/left.pyc"
    byte_code.parent.mkdir(exist_ok=True)
    byte_code.touch()
    command = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run_python(*command, "--wheel-dir", folder, folder / "source", check=True)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_contains_the_library_and_every_published_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    info = f"quasar_kernels-{quasar_kernels.__version__}.dist-info"
    assert tops == {"harness", "quasar_kernels", info}
    published = {f"quasar_kernels/overlay/{path}" for path in overlay_files()}
    assert published <= names, published - names
    assert {"harness/py.typed", "quasar_kernels/py.typed"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    tracked = run("git", "ls-files", "harness", "quasar_kernels", check=True).stdout.split()
    code = {name for name in tracked if name.endswith((".py", ".cu", ".cuh", ".json"))}
    assert code <= names, code - names


@pytest.mark.slow
def test_the_unpacked_wheel_imports_and_matches_the_float64_reference(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = run_python("-c", HIDING.format(names=HIDDEN) + USE, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *files, error = json.loads(done.stdout)
    assert all(Path(file).is_relative_to(tmp_path) for file in files), files
    assert error < 1e-5


def test_versions_and_changelog_agree() -> None:
    assert harness.__version__ == quasar_kernels.__version__
    released = re.findall(
        r"^## \[([0-9.]+)\] - \d{4}-\d\d-\d\d$", (PROJECT / "CHANGELOG.md").read_text(), re.M
    )
    assert released[0] == quasar_kernels.__version__
    assert metadata.version("quasar-kernels") == quasar_kernels.__version__, (
        "the installed project is older: run scripts/install.sh dev"
    )
