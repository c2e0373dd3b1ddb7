"""A real PostgreSQL server for a run of tests; where none is installed they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neurons.embedded.postgresql import Server as Server
from neurons.embedded.postgresql import find_programs, serve

FAST = "fsync=off\nfull_page_writes=off\n"
"""No test pulls the plug."""


def programs_or_skip() -> Path:
    """Return the server's programs; skip, and say so, where none are installed. CI never skips."""
    programs = find_programs()
    if programs is None:
        words = "PostgreSQL is not installed (Debian: apt install postgresql)"
        if os.environ.get("CI"):
            pytest.fail(f"{words}, and CI must not leave its tests out")
        pytest.skip(f"NOT TESTED ON POSTGRESQL: {words}")
    return programs


@contextmanager
def serve_or_skip() -> Iterator[Server]:
    """Run a server; skip where none is installed."""
    with serve(programs_or_skip(), FAST) as server:
        yield server
