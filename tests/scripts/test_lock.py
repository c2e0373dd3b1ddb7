"""requirements/lock.txt pins the dependencies of pyproject.toml, for every supported Python."""

import json
import re
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import PROJECT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
PROJECT_FILE = tomllib.loads((PROJECT / "pyproject.toml").read_text())
LOCK = dict(
    re.split(" +# via ", line)
    for line in (PROJECT / "requirements/lock.txt").read_text().splitlines()
    if not line.startswith("#")
)
"""Each pin with the packages that need it."""


def holds(requirement: Requirement, python: str) -> bool:
    """Return whether a requirement applies to this Python on Linux for x86-64."""
    machine = {"python_version": python, "python_full_version": f"{python}.1"}
    machine |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    return requirement.marker is None or requirement.marker.evaluate(machine)


def dependencies(python: str) -> list[Requirement]:
    """Return the dependencies of the project and of all its extras."""
    extras = PROJECT_FILE["project"]["optional-dependencies"].values()
    requirements = map(Requirement, sum(extras, PROJECT_FILE["project"]["dependencies"]))
    others = [wanted for wanted in requirements if wanted.name != PROJECT_FILE["project"]["name"]]
    return [wanted for wanted in others if holds(wanted, python)]


def pins(python: str) -> dict[str, str]:
    """Return the pinned versions by name."""
    pinned: dict[str, str] = {}
    for requirement in map(Requirement, LOCK):
        if holds(requirement, python):
            assert requirement.name not in pinned, "two pins on one machine"
            (version,) = requirement.specifier
            assert version.operator == "=="
            pinned[requirement.name] = version.version
    return pinned


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_and_extra_is_pinned_within_its_range(python: str) -> None:
    pinned = pins(python)
    for requirement in dependencies(python):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not pinned: run scripts/lock.sh"
        assert requirement.specifier.contains(version), f"{requirement}: {version} is pinned"


def test_no_removed_dependency_is_pinned() -> None:
    pinned = {Requirement(pin).name for pin, users in LOCK.items() if "quasar-kernels" in users}
    names = {
        canonicalize_name(wanted.name) for python in PYTHONS for wanted in dependencies(python)
    }
    assert pinned == names, "run scripts/lock.sh"


def test_supported_pythons_agree() -> None:
    named = [line.rpartition(" ")[2] for line in PROJECT_FILE["project"]["classifiers"]]
    assert [version for version in named if version[0].isdigit()] == PYTHONS
    assert PROJECT_FILE["project"]["requires-python"] == ">=3.10,<3.14"
    assert f"    {' | '.join(PYTHONS)}) ;;" in (PROJECT / "scripts/install.sh").read_text()
    workflow = (PROJECT / ".github/workflows/ci.yml").read_text()
    assert f"python: {json.dumps(PYTHONS)}" in workflow
