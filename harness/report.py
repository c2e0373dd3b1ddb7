"""What a measurement says, as schema-checked models, and the report file that keeps it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from harness.hardware.machine import Environment as Environment
from harness.hardware.machine import Frozen as Frozen
from harness.hardware.machine import NotNegative as NotNegative
from harness.hardware.machine import Positive as Positive
from harness.hardware.machine import Snapshot as Snapshot
from harness.hardware.machine import Telemetry as Telemetry

Kind = Literal[
    "timeout",
    "out_of_memory",
    "limit",
    "gate",
    "import",
    "crash",
    "protocol",
    "disturbed",
    "stopped",
]


class ReportError(Exception):
    """A report file cannot be trusted: missing, torn, altered or of another schema."""


class Check(Frozen):
    """The worst figure of one kind that the correctness gate found, beside its limit.

    `value` is None when the figure is not a finite number, which never passes.
    """

    name: str
    where: str = Field(description="the length or the tensor that gave this figure")
    value: Annotated[float, Field(allow_inf_nan=False)] | None
    limit: Annotated[float, Field(allow_inf_nan=False)]
    at_least: bool = Field(default=False, description="the limit is a smallest value")
    passed: bool

    def worse_than(self, other: Check) -> bool:
        """Tell whether this figure of the same kind is further on the wrong side."""
        if self.value is None or other.value is None:
            return self.value is None
        return self.value < other.value if self.at_least else self.value > other.value

    def __str__(self) -> str:
        relation = ">=" if self.at_least else "<="
        value = "not finite" if self.value is None else f"{self.value:.3g}"
        return f"{self.name} ({self.where}) is {value}, must be {relation} {self.limit:g}"


class GateResult(Frozen):
    """What the correctness gate found on `source_digest`, on inputs from the secret `seed`."""

    passed: bool
    checks: tuple[Check, ...]
    device: str
    dtype: str
    longest: int = Field(description="longest sequence compared with the oracle, in tokens")
    seconds: NotNegative
    seed: str
    source_digest: str

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)


class Measurement(Frozen):
    """One cold process that ran the validator's loop at one length."""

    length: int = Field(gt=0, description="sequence length in tokens")
    tokens_per_sec: Positive
    vram_mb: NotNegative = Field(description="peak memory allocated, MiB; 0 on a CPU")
    elapsed_seconds: Positive = Field(description="all timed calls together")
    host_seconds: NotNegative | None = Field(
        default=None, description="of these, until the last call had returned to the host"
    )
    process_seconds: NotNegative | None = Field(
        default=None, description="from the process's start to its last timed call, waits left out"
    )
    call_seconds: tuple[Positive, ...] = Field(
        default=(), description="single calls after the loop by CUDA events, each with a cold L2"
    )
    runs: int = Field(gt=0, description="timed calls between the two synchronizes")
    first_call_seconds: NotNegative = Field(description="the first call, compilation included")
    import_seconds: NotNegative = Field(description="importing the layer, after torch")
    cache: Literal["shared", "cold"] = Field(description="kernel caches at the start")
    source_file: str = Field(description="fla.ops.quasar.chunk as loaded, relative to the tree")
    layer_file: str
    source_digest: str = Field(description="SHA-256 over the files below the tree's fla folder")
    gate: GateResult | None = Field(description="None: the code was not checked")
    telemetry: Telemetry | None = None
    environment: Environment | None = None
    started_at: datetime


class Failure(Frozen):
    """A length that gave no measurement."""

    length: int = Field(gt=0)
    kind: Kind
    reason: str


class Report(Frozen):
    """A whole run of the harness over one tree."""

    schema_version: Literal[1, 2, 3] = Field(
        default=3, description="1: each gate in full; 2: less of the machine and of single calls"
    )
    protocol: str
    commit: str | None = Field(description="commit of the tree, `-dirty` when it has changes")
    checked: bool = Field(description="false when any measurement skipped the gate")
    created_at: datetime
    environment: Environment | None
    measurements: tuple[Measurement, ...]
    failures: tuple[Failure, ...] = ()

    def by_length(self) -> dict[int, list[Measurement]]:
        """Return the measurements, each with its machine, by sequence length, in their order."""
        groups: dict[int, list[Measurement]] = {}
        for measurement in self.measurements:
            whole = measurement.model_copy(update={"environment": self.environment})
            groups.setdefault(measurement.length, []).append(whole)
        return groups


def build_report(
    protocol: str,
    commit: str | None,
    measurements: Sequence[Measurement],
    failures: Sequence[Failure] = (),
) -> Report:
    """Return a report whose environment is said once.

    Raises:
        ValueError: the measurements come from different machines or software.
    """
    environments = [m.environment for m in measurements if m.environment is not None]
    if any(environment != environments[0] for environment in environments):
        raise ValueError("measurements of different environments cannot share one report")
    return Report(
        protocol=protocol,
        commit=commit,
        checked=all(m.gate is not None for m in measurements),
        created_at=datetime.now(timezone.utc),
        environment=environments[0] if environments else None,
        measurements=tuple(m.model_copy(update={"environment": None}) for m in measurements),
        failures=tuple(failures),
    )


def _folded(report: Report) -> dict[str, Any]:
    """Return what a file holds: each gate once, and in a measurement its place among them."""
    body, gates = report.model_dump(mode="json"), list[Any]()
    for measurement in body["measurements"]:
        gate = measurement["gate"]
        if gate is not None:
            if gate not in gates:
                gates.append(gate)
            measurement["gate"] = gates.index(gate)
    return {**body, "schema_version": 3, "gates": gates}


def _unfolded(body: dict[str, Any]) -> Report:
    """Return the report that a file holds, of any version.

    Raises:
        ValidationError, LookupError, TypeError: the fields do not fit.
    """
    gates = body.pop("gates", [])
    for measurement in body["measurements"]:
        if isinstance(measurement["gate"], int):
            measurement["gate"] = gates[measurement["gate"]]
    return Report.model_validate(body)


def _digest(report: dict[str, Any]) -> str:
    text = json.dumps(report, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_report(path: Path, report: Report) -> str:
    """Write `report` and its SHA-256 to `path` in one step and return the digest.

    A crash leaves the old file or the new one, never a part of either.

    Raises:
        OSError: the folder cannot be written.
    """
    body = _folded(report)
    digest = _digest(body)
    text = json.dumps({"sha256": digest, "report": body}, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut
    finally:
        os.close(folder)
    return digest


def load_report(path: Path) -> Report:
    """Read a report back.

    Raises:
        ReportError: the file is missing, torn, altered since it was written, or of another
            schema; the message says to measure again.
    """
    remedy = "measure again"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}; {remedy}") from error
    except ValueError as error:
        raise ReportError(f"{path}: not JSON, the file is torn; {remedy}") from error
    body = document.get("report") if isinstance(document, dict) else None
    if not isinstance(body, dict):
        raise ReportError(f"{path}: not a report of this harness; {remedy}")
    if document.get("sha256") != _digest(body):
        raise ReportError(f"{path}: its content does not match its sha256; {remedy}")
    try:
        return _unfolded(body)
    except (ValidationError, LookupError, TypeError) as error:
        raise ReportError(f"{path}: its fields do not fit; {remedy}") from error


def report_schema() -> dict[str, Any]:
    """Return the JSON schema of a report file, digest included."""
    schema = Report.model_json_schema(mode="serialization", ref_template="#/$defs/{model}")
    definitions = schema.pop("$defs", {})
    schema["properties"]["gates"] = {
        "type": "array",
        "items": {"$ref": "#/$defs/GateResult"},
        "description": "each gate once",
    }
    definitions["Measurement"]["properties"]["gate"] = {
        "anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}],
        "description": "its place in gates; null: the code was not checked",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Report file",
        "type": "object",
        "additionalProperties": False,
        "required": ["sha256", "report"],
        "properties": {"sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}, "report": schema},
        "$defs": definitions,
    }
