"""Creates a git repository from the installed fla-core, as the upstream of offline runs.

The repository's code imports the same modules as the public fork, so that imports take as long or
fail in the same way. Its only commit depends on content alone, so the same fla-core gives the same
hash everywhere. This module imports neither fla nor torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from neurons.runtime.errors import ConfigError, Held
from neurons.runtime.git.command import HardenedGit, commit_environment, scratch_beside
from quasar_kernels.contract import fork_imports
from quasar_kernels.fla_package import PACKAGE, close_packages, package_files

COMMITTED_AT = 1_735_689_600
"""The commit's date in Unix seconds; fixed, because it is part of the hash."""

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "flash-linear-attention"
version = "{version}"
description = "fla-core {version} as a repository, for use on one machine"
requires-python = ">=3.10"

[tool.setuptools.packages.find]
include = ["fla*"]
"""

_NOTICE = """\
The folder fla/ is the content of the Python package fla-core {version}, copied unchanged from its
installation. Its authors' repository is https://github.com/fla-org/flash-linear-attention, and its
licence is in LICENSE. fla/layers/__init__.py and fla/models/__init__.py, which that package lacks,
were added: the first imports what the public fork imports, and the second nothing.
"""


def make_upstream(path: Path, change: Callable[[Path], object] = lambda _: None) -> str:
    """Create or update the bare repository at `path`; return its file:// address.

    `change` may modify the folder that is committed. Raises a ConfigError if fla-core is not
    installed, and Held if `path` exists and is not a git repository.
    """
    path = path.absolute()
    if path.exists() and not (path / "HEAD").is_file():
        raise Held(f"{path} exists but is not a git repository.", "Move it away.")
    with scratch_beside(path) as scratch:
        _write_source(scratch / "source")
        change(scratch / "source")
        repository = path if path.exists() else scratch / "repository.git"
        _commit(repository, scratch / "source", scratch / "index")
        if repository != path:
            repository.rename(path)
    return path.as_uri()


def _commit(repository: Path, source: Path, index: Path) -> None:
    """Commit `source` as the root commit of `main`; repeating it changes nothing."""
    tool = HardenedGit(source)
    if not repository.exists():
        tool.init("--quiet", "--bare", "--template=", "--initial-branch=main", str(repository))
    env = {
        "GIT_DIR": str(repository),
        "GIT_WORK_TREE": str(source),
        "GIT_INDEX_FILE": str(index),
        **commit_environment(COMMITTED_AT),
    }
    tool.add("--all", "--force", ".", env=env)
    tree = tool.write_tree(env=env)
    commit = tool.commit_tree(tree, "-m", f"Import {PACKAGE} {_version()}", env=env)
    tool.update_ref("refs/heads/main", commit, env=env)


def _write_source(source: Path) -> None:
    version = _version()
    for name, origin in package_files().items():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, target)
        target.chmod(0o644)
    layers = source / "fla" / "layers" / "__init__.py"
    if not layers.exists():
        layers.parent.mkdir(parents=True, exist_ok=True)
        layers.write_text(_imports())
    close_packages(source)
    (source / "pyproject.toml").write_text(_PYPROJECT.format(version=version))
    (source / "NOTICE").write_text(_NOTICE.format(version=version))
    (source / ".gitignore").write_text("__pycache__/\n*.py[cod]\n")
    for file in importlib.metadata.files(PACKAGE) or []:
        if file.name.upper().startswith("LICENSE") and file.parts[0].endswith(".dist-info"):
            shutil.copyfile(os.fspath(file.locate()), source / "LICENSE")


def _imports() -> str:
    """Return Python that imports every module and name that the public fork imports."""
    lines = ['"""Imports what the public fork imports, and nothing else."""', ""]
    for module, names in fork_imports().items():
        lines.append(f"from {module} import {', '.join(names)}" if names else f"import {module}")
    return "\n".join([*lines, ""])


def _version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        problem = f"The package {PACKAGE} is not installed. Run scripts/install.sh miner."
        raise ConfigError(problem) from None
