"""The report file: all samples of a tree on one machine, with a digest of the content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from harness.files import write_atomically
from harness.hardware.machine import Environment, Frozen
from harness.sample import Failure, Sample


class ReportError(Exception):
    """A report file cannot be trusted: missing, torn, altered or of another schema."""


class Report(Frozen):
    """A whole run of the harness over one tree."""

    schema_version: Literal[2, 3] = Field(
        default=3, description="2: less of the machine and of single calls"
    )
    protocol: str
    commit: str | None = Field(description="commit of the tree, `-dirty` when it has changes")
    checked: bool = Field(description="false when any sample skipped the correctness check")
    created_at: datetime
    environment: Environment | None
    measurements: tuple[Sample, ...]
    failures: tuple[Failure, ...] = ()

    def by_length(self) -> dict[int, list[Sample]]:
        """Return the samples by length, in their order, each with the report's environment."""
        groups: dict[int, list[Sample]] = {}
        for sample in self.measurements:
            whole = sample.model_copy(update={"environment": self.environment})
            groups.setdefault(sample.length, []).append(whole)
        return groups


def build_report(
    protocol: str,
    commit: str | None,
    samples: Sequence[Sample],
    failures: Sequence[Failure] = (),
) -> Report:
    """Return a report; raise a ValueError for samples of several machines or software."""
    environments = [sample.environment for sample in samples if sample.environment is not None]
    if any(environment != environments[0] for environment in environments):
        raise ValueError("samples of different environments cannot share one report")
    return Report(
        protocol=protocol,
        commit=commit,
        checked=all(sample.correctness is not None for sample in samples),
        created_at=datetime.now(timezone.utc),
        environment=environments[0] if environments else None,
        measurements=tuple(sample.model_copy(update={"environment": None}) for sample in samples),
        failures=tuple(failures),
    )


def _to_file(report: Report) -> dict[str, Any]:
    """Return a file's content: checks are listed once, in `gates`, and samples have indices."""
    body, gates = report.model_dump(mode="json"), list[Any]()
    for sample in body["measurements"]:
        sample["gate"] = gate = sample.pop("correctness")
        if gate is not None:
            if gate not in gates:
                gates.append(gate)
            sample["gate"] = gates.index(gate)
    return {**body, "schema_version": 3, "gates": gates}


def _from_file(body: dict[str, Any]) -> Report:
    """Return the report in a file of any version; a ValidationError if fields do not fit."""
    gates = body.pop("gates", [])
    for sample in body["measurements"]:
        gate = sample["gate"]
        del sample["gate"]
        sample["correctness"] = None if gate is None else gates[gate]
    return Report.model_validate(body)


def _digest(report: dict[str, Any]) -> str:
    text = json.dumps(report, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_report(path: Path, report: Report) -> str:
    """Write `report` and its SHA-256 to `path` in one step and return the digest.

    A power failure may leave an incomplete file, which `load_report` detects. Raises an OSError.
    """
    body = _to_file(report)
    digest = _digest(body)
    text = json.dumps({"sha256": digest, "report": body}, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return digest


def load_report(path: Path) -> Report:
    """Read a report back; raise a ReportError for one that is torn, altered or foreign."""
    remedy = "measure again"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        body = document.get("report") if isinstance(document, dict) else None
        digest = _digest(body) if isinstance(body, dict) else ""
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}; {remedy}") from error
    except (ValueError, RecursionError) as error:  # JSON has no NaN and no infinity
        raise ReportError(f"{path}: not JSON, the file is torn; {remedy}") from error
    if not isinstance(body, dict):
        raise ReportError(f"{path}: not a report of this harness; {remedy}")
    if document.get("sha256") != digest:
        raise ReportError(f"{path}: its content does not match its sha256; {remedy}")
    try:
        return _from_file(body)
    except (ValidationError, LookupError, TypeError) as error:
        raise ReportError(f"{path}: its fields do not fit; {remedy}") from error
