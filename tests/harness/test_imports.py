"""Errors of a tree's import: a module missing outside of the tree has a name and a remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.imports import explain_import, install_command
from harness.measuring.runner import MeasurementError, check_import


def test_a_good_tree_is_imported(make_tree: Any) -> None:
    assert check_import(make_tree()) > 0


@pytest.mark.parametrize(
    ("layer", "kind", "reason", "remedy"),
    [
        (
            "import no_such_module.part",
            *("import", "fla/layers/quasar.py needs no_such_module, which is not installed"),
            "Install that module",
        ),
        ("from fla.nowhere import x", "crash", "ModuleNotFoundError: No module named", ""),
    ],
)
def test_a_failed_import_has_its_kind_and_remedy(make_tree, layer, kind, reason, remedy):
    with pytest.raises(MeasurementError) as caught:
        check_import(make_tree(layer=layer))
    error = caught.value
    assert (error.kind, error.reason[: len(reason)]) == (kind, reason)
    assert error.remedy.startswith(remedy)
    assert bool(error.remedy) == bool(remedy)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "from packaging import gone",
            "needs another version of packaging: cannot import name 'gone'",
        ),
        ("import packaging.gone", "needs another version of packaging: No module named"),
        ("from json import gone", None),
    ],
)
def test_an_unsuitable_module_is_reported(tmp_path: Path, code: str, reason: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(code)  # noqa: S102 # an import that fails
    explained = explain_import(caught.value, tmp_path)
    assert (explained or "").partition(" ")[2].startswith(reason or "")
    assert bool(explained) == bool(reason)


def test_the_install_command_has_the_projects_version_range(monkeypatch):
    requires = ["transformers<6,>=4.53", 'triton>=3.3; platform_system == "Linux"', "fla-core>=0.6"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: requires)
    pip = f"{sys.executable} -m pip install"
    assert install_command("transformers") == f"{pip} 'transformers<6,>=4.53'"
    assert install_command("triton") == f"{pip} 'triton>=3.3'"
    assert install_command("flash_attn") == f"{pip} flash_attn"
