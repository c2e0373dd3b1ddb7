"""What load.py found, as schema-checked models."""

from __future__ import annotations

from datetime import date
from typing import Literal

from pydantic import Field

from benchmarks.results import Frozen, NotNegative, Positive


class Traffic(Frozen):
    """One kind of requests, sent at a set rate or as fast as answers come."""

    requests: str
    asked: Positive | None = Field(description="requests/s that were sent; None: without a pause")
    answered: Positive = Field(description="requests/s that were answered with 200")
    failed: int
    p50_ms: Positive
    p99_ms: Positive


class Backend(Frozen):
    """One database."""

    database: str
    traffic: tuple[Traffic, ...]
    acknowledged: int = Field(description="commits answered before kill -9 under load")
    lost: int = Field(description="of them, those that are gone after the restart")
    restart_seconds: Positive


class Load(Frozen):
    """One run on one machine."""

    schema_version: Literal[1] = 1
    created: date
    commit: str | None
    processor: str
    cores: int
    load_before: NotNegative = Field(description="1-minute load average before the run")
    rows: int = Field(description="submissions in the database before")
    slow_client_seconds: Positive | None = Field(description="until it was cut off; None: never")
    backends: tuple[Backend, ...]
