"""A real PostgreSQL server of the tests' own, from the system's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

PACKAGES = Path("/usr/lib/postgresql")
SERVICE_USER = "postgres"
"""The server refuses to run as root; the package makes this user for it."""
SETTINGS = "fsync=off\nfull_page_writes=off\nmax_connections=100\nlisten_addresses=''\n"

_numbers = count()


def find_programs() -> Path | None:
    """Return the folder of initdb and pg_ctl, of the newest version installed."""
    folders = [path.parent for path in PACKAGES.glob("*/bin/initdb")]
    if folders:
        return max(folders, key=lambda folder: float(folder.parent.name))
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


class Server:
    """A running server, reached through a socket in its own folder."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder

    def new_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"test{next(_numbers)}"
        self._sql("postgres", f"CREATE DATABASE {name}")
        return f"postgresql://quasar@/{name}?host={self._folder}"

    def run_file(self, url: str, path: Path) -> None:
        """Run a file of SQL on the database of the URL."""
        self._sql(url.partition("?")[0].rpartition("/")[2], path.read_text())

    def _sql(self, database: str, text: str) -> None:
        command = [str(self._programs / "psql"), "-qX", "-v", "ON_ERROR_STOP=1", "-U", "quasar"]
        place = ["-h", str(self._folder), "-d", database]
        subprocess.run([*command, *place], input=text, text=True, check=True, capture_output=True)


@contextmanager
def serve(programs: Path, settings: str = SETTINGS) -> Iterator[Server]:
    """Run a server with an empty cluster in a folder that is removed afterwards."""
    user = SERVICE_USER if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as name:
        folder = Path(name)
        if user:
            shutil.chown(folder, user)

        def run(*words: object) -> None:
            subprocess.run(
                [str(word) for word in words],
                check=True,
                capture_output=True,
                text=True,
                user=user,
                cwd=folder,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
            )

        data = folder / "data"
        run(programs / "initdb", "-D", data, "-U", "quasar", "-A", "trust", "--no-sync")
        with (data / "postgresql.conf").open("a") as file:
            file.write(f"{settings}unix_socket_directories='{folder}'\n")
        control = (programs / "pg_ctl", "-D", data, "-w", "-s", "-l", folder / "log")
        run(*control, "start")
        try:
            yield Server(programs, folder)
        finally:
            run(*control, "-m", "immediate", "stop")


@contextmanager
def serve_or_skip() -> Iterator[Server]:
    """Run a server; skip, and say so, where none is installed. CI never skips."""
    programs = find_programs()
    if programs is None:
        words = "PostgreSQL is not installed (Debian: apt install postgresql)"
        if os.environ.get("CI"):
            pytest.fail(f"{words}, and CI must not leave its tests out")
        pytest.skip(f"NOT TESTED ON POSTGRESQL: {words}")
    with serve(programs) as server:
        yield server
