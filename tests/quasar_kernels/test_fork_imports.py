"""The recorded imports of the public fork: correct, and provided by the project's dependencies.

With QUASAR_LIVE_FORK, a clone at the recorded commit, the imports are recorded again and compared
with the imports that Python executes there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from record_fork_imports import LOADED, as_json, find_imports, main

from quasar_kernels.contract import FORK_IMPORTS, fork_imports
from tests import PROJECT
from tests.processes import run, run_python
from tests.repositories import write_files

LIVE = os.environ.get("QUASAR_LIVE_FORK")

# Runs in a child process: records the imports that fla's modules execute.
TRACE = """
import builtins, importlib, json, sys
real, seen = builtins.__import__, set()
def note(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and (globals or {}).get("__name__", "").split(".")[0] == "fla":
        seen.add(name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = note
for module in sys.argv[1:]:
    importlib.import_module(module)
print(json.dumps([name for name in seen if name in sys.modules]))
"""


def dependencies() -> dict[str, Requirement]:
    """Return the requirements of pyproject.toml and its extra `miner`, by lower-case name."""
    text = (PROJECT / "pyproject.toml").read_text()
    blocks = re.findall(r"^(?:dependencies|miner) = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    lines = re.findall(r'^  "(.+?)",', "".join(blocks), re.MULTILINE)
    return {one.name.lower(): one for one in map(Requirement, lines)}


def test_every_import_is_provided_by_a_dependency() -> None:
    required, distributions = dependencies(), importlib.metadata.packages_distributions()
    for module in {name.split(".")[0] for name in fork_imports()}:
        # a distribution that is twice on the path is listed twice
        (name,) = {d.lower() for d in distributions[module]} & required.keys()
        requirement = required[name]
        version = importlib.metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), (module, version)


def test_every_imported_name_is_installed() -> None:
    for module, names in fork_imports().items():
        installed = importlib.import_module(module)
        for name in names:
            if not hasattr(installed, name):
                importlib.import_module(f"{module}.{name}")


def test_only_unconditional_imports_are_recorded(tmp_path: Path) -> None:
    files = {
        "fla/__init__.py": "import certain.sub as c\nfrom fla.layers import thing\n",
        "fla/layers/__init__.py": "from .thing import A\nfrom . import leaf\nfrom ..util import x",
        "fla/layers/thing.py": "import os, math\nfrom two import b, a\n"
        "def f():\n    import in_function\n"
        "class A:\n    import in_class\n",
        "fla/layers/leaf.py": "try:\n    import tried\nexcept ImportError:\n    import caught\n"
        "if TYPE_CHECKING:\n    import typed\nfrom two import c\n",
        "fla/util.py": "from __future__ import annotations\nfrom collections import abc\n",
        "fla/never.py": "import never\n",
    }
    write_files(tmp_path, files)
    expected = {"certain.sub": set(), "two": {"a", "b", "c"}, "in_class": set()}
    assert find_imports(tmp_path, ["fla"]) == expected
    with pytest.raises(FileNotFoundError, match=r"fla\.gone"):
        find_imports(tmp_path, ["fla.gone"])


def test_a_folder_that_is_not_a_checkout_of_the_fork(tmp_path, capsys):
    before = FORK_IMPORTS.read_bytes()
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2
    assert f"{tmp_path} is not a checkout of the fork" in capsys.readouterr().err
    assert FORK_IMPORTS.read_bytes() == before


@pytest.mark.skipif(LIVE is None, reason="QUASAR_LIVE_FORK is not set")
def test_the_record_equals_the_fork_s_imports() -> None:
    tree = Path(str(LIVE))
    commit = json.loads(FORK_IMPORTS.read_text())["commit"]
    assert run("git", "rev-parse", "HEAD", cwd=tree).stdout.strip() == commit
    assert as_json(find_imports(tree), commit) == FORK_IMPORTS.read_text()
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    traced = run_python("-c", TRACE, *LOADED, env=env, check=True)
    ignored = {"fla", *sys.stdlib_module_names}
    executed = {name for name in json.loads(traced.stdout) if name.split(".")[0] not in ignored}
    recorded = set(fork_imports())
    assert recorded <= executed
    # Imports within `try` or `if` may be executed as well, from the same distributions.
    assert {name.split(".")[0] for name in executed} == {name.split(".")[0] for name in recorded}
