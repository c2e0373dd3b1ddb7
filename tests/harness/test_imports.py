"""A missing module is an error of kind `import` with a name and a remedy, wherever it is found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.imports import install_command
from harness.measuring.runner import MeasurementError, Options, check, check_import, measure
from quasar_kernels.contract import fork_imports
from tests.processes import run_python


def failed(tree: Path) -> MeasurementError:
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
def test_what_is_missing_is_named_with_who_needs_it(make_tree, code, needs, module):
    error = failed(make_tree(layer=code))
    assert error.kind == "import"
    assert error.reason.startswith(f"fla/layers/quasar.py needs {needs}")
    known = module in fork_imports()
    command = f"Run {install_command(module)}."
    assert error.remedy == command if known else error.remedy.startswith("Install that module")


@pytest.mark.parametrize("code", ["from fla.nowhere import x", "from json import gone"])
def test_a_fault_of_the_tree_itself_is_a_crash(make_tree: Any, code: str) -> None:
    error = failed(make_tree(layer=code))
    assert error.kind == "crash"
    assert error.remedy == ""


def test_check_timing_and_command_line_report_the_same(make_tree: Any) -> None:
    tree = make_tree(layer="import no_such_module")
    error = failed(tree)
    for run in (check, measure):
        with pytest.raises(MeasurementError) as caught:
            run(tree, 16, Options("cpu"))
        assert (caught.value.kind, caught.value.reason) == ("import", error.reason)

    done = run_python("-m", "harness", "--tree", tree, "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr.count(f"{error.reason}. {error.remedy}") == 1  # once, not for every length
    assert done.stderr.count(error.reason) == 1
    assert "nvidia-smi" not in done.stderr


def test_the_command_keeps_to_the_range_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["transformers<6,>=4.53", 'triton>=3.3; platform_system == "Linux"', "fla-core>=0.6"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: requires)
    pip = f"{sys.executable} -m pip install"
    assert install_command("transformers") == f"{pip} 'transformers<6,>=4.53'"
    assert install_command("triton") == f"{pip} 'triton>=3.3'"
    assert install_command("flash_attn") == f"{pip} flash_attn"
