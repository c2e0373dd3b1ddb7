"""requirements/lock.txt pins what pyproject.toml asks for, on every Python that it names."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import PROJECT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
THIS = "{}.{}".format(*sys.version_info)
ASKED = tomllib.loads((PROJECT / "pyproject.toml").read_text())
LOCK = dict(
    re.split(" +# via ", line)
    for line in (PROJECT / "requirements/lock.txt").read_text().splitlines()
    if not line.startswith("#")
)
"""Who asks for a pinned version, by the pin."""


def holds(requirement: Requirement, python: str) -> bool:
    """Whether pip heeds it with this Python on Linux for x86-64."""
    machine = {"python_version": python, "python_full_version": f"{python}.1"}
    machine |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    return requirement.marker is None or requirement.marker.evaluate(machine)


def asked(python: str = THIS) -> list[Requirement]:
    """The dependencies of the project and of all its extras."""
    extras = ASKED["project"]["optional-dependencies"].values()
    requirements = map(Requirement, sum(extras, ASKED["project"]["dependencies"]))
    others = [wanted for wanted in requirements if wanted.name != ASKED["project"]["name"]]
    return [wanted for wanted in others if holds(wanted, python)]


def pins(python: str = THIS) -> dict[str, str]:
    """The pinned versions by name."""
    pinned: dict[str, str] = {}
    for requirement in map(Requirement, LOCK):
        if holds(requirement, python):
            assert requirement.name not in pinned, "two pins on one machine"
            (version,) = requirement.specifier
            pinned[requirement.name] = version.version
    return pinned


def needed_by_what_is_installed() -> Iterator[tuple[str, Requirement]]:
    """(package, what it asks for) of all installed packages that pyproject.toml leads to."""
    queue = [
        (requirement.name, extra) for requirement in asked() for extra in ["", *requirement.extras]
    ]
    seen = set(queue)
    while queue:
        name, extra = queue.pop()
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of another build: CUDA's libraries on a machine without a GPU
        for requirement in map(Requirement, lines):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield name, requirement
                found = {(requirement.name, extra) for extra in ["", *requirement.extras]}
                queue += found - seen
                seen |= found


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_and_extra_is_pinned_within_its_range(python: str) -> None:
    pinned = pins(python)
    for requirement in asked(python):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not pinned: run scripts/lock.sh"
        assert requirement.specifier.contains(version), f"{requirement}: {version} is pinned"


def test_what_is_no_longer_asked_for_is_no_longer_pinned() -> None:
    pinned = {Requirement(pin).name for pin, askers in LOCK.items() if "quasar-kernels" in askers}
    names = {canonicalize_name(wanted.name) for python in PYTHONS for wanted in asked(python)}
    assert pinned == names, "run scripts/lock.sh"


def test_what_the_installed_packages_ask_for_is_pinned_within_its_range() -> None:
    pinned = pins()
    for name, requirement in needed_by_what_is_installed():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{name} needs {requirement}: run scripts/lock.sh"
        assert requirement.specifier.contains(version), f"{name} needs {requirement}, not {version}"


def test_the_lock_holds_versions_alone() -> None:
    for line in LOCK:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+(post[0-9]+)?( ; .*)?", line), line


def test_what_builds_the_project_is_exact_too() -> None:
    for requirement in map(Requirement, ASKED["build-system"]["requires"]):
        assert [version.operator for version in requirement.specifier] == ["=="]


def test_the_pythons_are_the_same_wherever_they_are_named() -> None:
    named = [line.rpartition(" ")[2] for line in ASKED["project"]["classifiers"]]
    assert [version for version in named if version[0].isdigit()] == PYTHONS
    assert ASKED["project"]["requires-python"] == ">=3.10,<3.14"
    assert f"    {' | '.join(PYTHONS)}) ;;" in (PROJECT / "scripts/install.sh").read_text()
    workflow = (PROJECT / ".github/workflows/ci.yml").read_text()
    assert f"python: {json.dumps(PYTHONS)}" in workflow
    for document in ("README.md", "docs/operating.md"):
        assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (PROJECT / document).read_text()
