"""The upstream that is created from the installed fla-core: content, determinism, crashes."""

import ast
import importlib.metadata
import os
import signal
from pathlib import Path

import pytest

from neurons.embedded import upstream as embedded_upstream
from neurons.embedded.upstream import make_upstream
from neurons.runtime.errors import ConfigError, Held
from quasar_kernels.contract import fork_imports
from tests.processes import run_python
from tests.repositories import run_git


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("upstream") / "upstream.git"
    assert make_upstream(path) == f"file://{path}"
    return path


def head(repository: Path) -> str:
    return run_git(repository, "rev-parse", "HEAD")


def test_a_clone_holds_the_installed_package_byte_for_byte(upstream: Path, tmp_path: Path) -> None:
    run_git(tmp_path, "clone", "-q", f"file://{upstream}", "clone")
    clone = tmp_path / "clone"
    files = importlib.metadata.distribution("fla-core").files or []
    sources = [f for f in files if f.parts[0] == "fla" and f.suffix != ".pyc"]
    assert len(sources) > 100
    for file in sources:
        assert (clone / file).read_bytes() == Path(os.fspath(file.locate())).read_bytes()
    assert not list(clone.rglob("__pycache__"))
    assert "Permission is hereby granted" in (clone / "LICENSE").read_text()
    assert "fla-core" in (clone / "NOTICE").read_text()
    text = (clone / "fla/layers/__init__.py").read_text()
    imports = [
        node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert fork_imports().keys() <= modules  # an import takes as long as the public fork's
    assert run_git(clone, "branch", "--show-current") == "main"
    assert run_git(clone, "rev-list", "--count", "HEAD") == "1"


def test_the_commit_depends_on_content_alone(upstream, tmp_path, monkeypatch):
    before, elsewhere = head(upstream), tmp_path / "elsewhere.git"
    make_upstream(upstream)
    make_upstream(elsewhere)
    assert head(upstream) == before == head(elsewhere)
    assert not list(upstream.parent.glob(".*"))
    monkeypatch.setattr(embedded_upstream, "_version", lambda: "9.9.9")
    make_upstream(elsewhere)
    assert head(elsewhere) != before
    assert 'version = "9.9.9"' in run_git(elsewhere, "show", "HEAD:pyproject.toml")


def test_after_a_kill_before_the_rename_it_is_created_again(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from neurons.embedded.upstream import make_upstream\n"
        "Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "make_upstream(Path(sys.argv[1]))"
    )
    path = tmp_path / "upstream.git"
    assert run_python("-c", code, path).returncode == -signal.SIGKILL
    assert not path.exists()
    assert list(tmp_path.glob(".upstream.git.partial-*"))
    make_upstream(path)
    assert run_git(path, "rev-list", "--count", "main") == "1"
    assert list(tmp_path.iterdir()) == [path]


def test_an_occupied_path_and_a_missing_package_are_errors(tmp_path, monkeypatch):
    thesis = tmp_path / "mine/thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("keep")
    with pytest.raises(Held, match="is not a git repository"):
        make_upstream(tmp_path / "mine")
    assert thesis.read_text() == "keep"
    monkeypatch.setattr(embedded_upstream, "PACKAGE", "no-such-package-is-installed")
    with pytest.raises(ConfigError, match="no-such-package-is-installed is not installed"):
        make_upstream(tmp_path / "upstream.git")
