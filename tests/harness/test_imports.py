"""Errors of a tree's import: a missing module has the kind `import`, a name and a remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.imports import install_command
from harness.measuring.runner import MeasurementError, Options, check, check_import, measure
from quasar_kernels.contract import fork_imports
from tests.processes import run_python


def import_error(tree: Path) -> MeasurementError:
    with pytest.raises(MeasurementError) as caught:
        check_import(tree)
    return caught.value


def test_a_good_tree_is_imported(make_tree: Any) -> None:
    assert check_import(make_tree()) > 0


@pytest.mark.parametrize(
    ("code", "needs", "module"),
    [
        ("import no_such_module.part", "no_such_module, which is not installed", "no_such_module"),
        ("from packaging import gone", "another packaging: cannot import name 'gone'", "packaging"),
        ("import packaging.gone", "another packaging: No module named", "packaging"),
    ],
)
def test_the_error_names_the_missing_module_and_the_importing_file(make_tree, code, needs, module):
    error = import_error(make_tree(layer=code))
    assert error.kind == "import"
    assert error.reason.startswith(f"fla/layers/quasar.py needs {needs}")
    known = module in fork_imports()
    command = f"Run {install_command(module)}."
    assert error.remedy == command if known else error.remedy.startswith("Install that module")


@pytest.mark.parametrize("code", ["from fla.nowhere import x", "from json import gone"])
def test_a_module_missing_in_the_tree_is_a_crash(make_tree: Any, code: str) -> None:
    error = import_error(make_tree(layer=code))
    assert error.kind == "crash"
    assert error.remedy == ""


def test_check_timing_and_command_line_report_the_same(make_tree: Any) -> None:
    tree = make_tree(layer="import no_such_module")
    error = import_error(tree)
    for run in (check, measure):
        with pytest.raises(MeasurementError) as caught:
            run(tree, 16, Options("cpu"))
        assert (caught.value.kind, caught.value.reason) == ("import", error.reason)

    done = run_python("-m", "harness", "--tree", tree, "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr.count(f"{error.reason}. {error.remedy}") == 1  # once, not for every length
    assert done.stderr.count(error.reason) == 1
    assert "nvidia-smi" not in done.stderr


def test_the_install_command_has_the_projects_version_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requires = ["transformers<6,>=4.53", 'triton>=3.3; platform_system == "Linux"', "fla-core>=0.6"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: requires)
    pip = f"{sys.executable} -m pip install"
    assert install_command("transformers") == f"{pip} 'transformers<6,>=4.53'"
    assert install_command("triton") == f"{pip} 'triton>=3.3'"
    assert install_command("flash_attn") == f"{pip} flash_attn"
