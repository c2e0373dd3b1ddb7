"""The one format of all measured data: a run of a case on one machine, as a list of entries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from harness.hardware.machine import Environment, Frozen, NotNegative
from harness.source import tree_commit

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "h200"
"""The data that the documents show."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Number = bool | int | Finite
Scalar = Number | str


class Entry(Frozen):
    """One measured call, or the reason why it could not be measured."""

    table: str = Field(description="which of the case's tables it belongs to")
    of: dict[str, Scalar] = Field({}, description="key of the call, such as width and tokens")
    by: str = Field("", description="the implementation")
    figures: dict[str, Number] = Field({}, description="by name, with the unit last, if any")
    errors: dict[str, NotNegative] = Field({}, description="relative RMS against float64")
    series: dict[str, tuple[Finite, ...]] = Field({}, description="figures over steps")
    texts: dict[str, str] = Field({}, description="other results, as text")
    failure: str | None = None

    def get(self, name: str) -> Any:
        """Return the value of this name in the key or the results, or None."""
        values = {"by": self.by, **self.of, **self.figures, **self.errors, **self.texts}
        return values.get(name)

    def worst(self) -> tuple[str, float]:
        """Return the largest error's name and value."""
        return max(self.errors.items(), key=lambda item: item[1])

    def __str__(self) -> str:
        call = [f"{name} {value}" for name, value in self.of.items()]
        results = [f"{name} {value:.5g}" for name, value in {**self.figures, **self.errors}.items()]
        where = ", ".join([self.table, *call, *filter(None, [self.by])])
        return f"{where}: {self.failure or ', '.join(results)}"


class Row(NamedTuple):
    """The entries of one call, by implementation."""

    of: Mapping[str, Any]
    by: Mapping[str, Entry]

    def get(self, name: str) -> Any:
        """Return the key's value of this name, or the implementation's entry, or None."""
        return self.of.get(name, self.by.get(name))

    def figure(self, by: str, name: str) -> Number | None:
        """Return a figure of an implementation, or None."""
        return self.by[by].figures.get(name) if by in self.by else None

    def ratio(self, name: str, over: str, under: str) -> float | None:
        """Return the ratio of two implementations' figures, or None if one is missing."""
        a, b = self.figure(over, name), self.figure(under, name)
        return None if a is None or b is None else a / b

    def failures(self) -> Iterator[tuple[str, str]]:
        """Yield the implementations that failed and why."""
        return ((by, entry.failure) for by, entry in self.by.items() if entry.failure)


class Run(Frozen):
    """One run of a case on one machine: a file."""

    schema_version: Literal[2] = 2
    case: str = Field(description="the case's name on the command line")
    created: date
    commit: str | None
    environment: Environment | None = Field(description="None if independent of the machine")
    protocol: str
    versions: dict[str, str] = Field({}, description="of packages and tools that are compared")
    settings: dict[str, Scalar] = Field({}, description="settings and facts of all entries")
    entries: tuple[Entry, ...] = ()

    def adding(self, *entries: Entry, **settings: Scalar) -> Run:
        """Return the run with more entries and settings."""
        return self.model_copy(
            update={
                "entries": (*self.entries, *entries),
                "settings": {**self.settings, **settings},
            }
        )

    def growing(self, entries: Iterable[Entry]) -> Iterator[Run]:
        """Yield the run as each entry is added."""
        run = self
        for entry in entries:
            run = run.adding(entry)
            yield run

    def table(self, name: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.table == name]

    def rows(self, table: str) -> list[Row]:
        """Return the entries of one table grouped by `of`, ordered by each group's first."""
        rows: dict[str, Row] = {}
        for entry in self.table(table):
            row = rows.setdefault(json.dumps(entry.of), Row(entry.of, {}))
            row.by[entry.by] = entry  # type: ignore[index] # a dict
        return list(rows.values())

    @property
    def gpu(self) -> str:
        """The GPU's name, or "no GPU"."""
        return (self.environment and self.environment.gpu) or "no GPU"

    def number(self, setting: str) -> float:
        """Return a setting that is a number."""
        return float(self.settings[setting])

    def where(self, *more: str) -> dict[str, str]:
        """Return the conditions of the run: machine, date, versions, `more` and commit."""
        facts, e = {}, self.environment
        if e is not None:
            machine = f"{e.gpu}, driver {e.driver}" if e.gpu else f"no GPU, {e.cpu}"
            facts["GPU"] = "; ".join([machine, versions(e), *more])
        return {**facts, "date, commit": f"{self.created}, {self.commit}"}


def versions(environment: Environment) -> str:
    """Return the versions that figures depend on."""
    return f"torch {environment.torch}, Triton {environment.triton}"


def start(
    case: str, protocol: str, commit: str | None, *, device: str | None = "cuda", **fields: Any
) -> Run:
    """Return an empty run of today, this machine, and `commit` or the checkout's commit.

    Args:
        device: "cpu" for a trial on a machine with a GPU; None leaves the machine out.
        fields: `versions` and `settings`.
    """
    environment = None
    if device is not None:
        import torch

        from harness.worker.machine.environment import describe

        environment = describe(torch.device(device if torch.cuda.is_available() else "cpu"))
    return Run(
        case=case,
        created=datetime.now(timezone.utc).date(),
        commit=commit or tree_commit(ROOT),
        environment=environment,
        protocol=protocol,
        **fields,
    )


def load(path: Path) -> Run:
    """Read a run's file.

    Raises:
        OSError, pydantic.ValidationError: the file is missing, or is not a run.
    """
    return Run.model_validate_json(path.read_text(encoding="utf-8"))


def write(path: Path, run: Run) -> None:
    """Write a file with one line for each entry; it replaces an old file atomically."""
    body = run.model_dump(mode="json", exclude_defaults=True, exclude={"entries"})
    lines = [json.dumps(e.model_dump(mode="json", exclude_defaults=True)) for e in run.entries]
    head = json.dumps({"schema_version": run.schema_version, **body}, indent=1)
    text = f'{head[:-2]},\n "entries": [\n' + ",\n".join(lines) + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
