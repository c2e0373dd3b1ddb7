"""What came of mutants, as data."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from benchmarks.results import ROOT, Frozen

DATA = ROOT / "benchmarks" / "mutants.json"


class Left(Frozen):
    """A mutant that no test noticed; `equivalent` says why nobody could, or is empty: a gap."""

    operator: str
    line: int
    before: str
    after: str
    equivalent: str = ""


class Module(Frozen):
    """How many mutants a module has, how many were tried by its tests, and which were left."""

    path: str
    created: date
    commit: str | None
    seed: int
    made: int
    tried: int
    left: tuple[Left, ...]

    @property
    def noticed(self) -> int:
        """How many a test noticed."""
        return self.tried - len(self.left)

    @property
    def equivalent(self) -> int:
        """How many of those that are left change nothing."""
        return sum(bool(one.equivalent) for one in self.left)


class Mutants(Frozen):
    """All modules."""

    modules: tuple[Module, ...] = ()


def load(path: Path = DATA) -> Mutants:
    """Read the figures.

    Raises:
        OSError, pydantic.ValidationError: the file is missing, or holds something else.
    """
    return Mutants.model_validate_json(path.read_text(encoding="utf-8"))


def write(found: Module, path: Path = DATA) -> None:
    """Put a module's figures in the place of its earlier ones; reasons of mutants are kept."""
    known = load(path) if path.exists() else Mutants()
    said = {
        (one.before, one.after): one.equivalent
        for module in known.modules
        if module.path == found.path
        for one in module.left
    }
    left = tuple(
        one.model_copy(update={"equivalent": said.get((one.before, one.after), one.equivalent)})
        for one in sorted(found.left, key=lambda one: one.line)
    )
    modules = {module.path: module for module in known.modules}
    modules[found.path] = found.model_copy(update={"left": left})
    ordered = tuple(modules[path] for path in sorted(modules))
    whole = known.model_copy(update={"modules": ordered})
    path.write_text(whole.model_dump_json(indent=1) + "\n", encoding="utf-8")
