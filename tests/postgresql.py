"""A real PostgreSQL server for tests, which are skipped if none is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.processes import HANG

SETTINGS = """\
max_connections=100
listen_addresses=''
fsync=off
full_page_writes=off
"""
"""Settings of the server: no durability, which tests do not need."""

_numbers = count()


def programs_or_skip() -> Path:
    """Return the folder of the newest server's programs; without one, skip, or fail in CI."""
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if folders:
        return max(folders, key=lambda folder: float(folder.parent.name))
    elsewhere = shutil.which("initdb")
    if elsewhere:
        return Path(elsewhere).resolve().parent
    words = "PostgreSQL is not installed (Debian: apt install postgresql)"
    if os.environ.get("CI"):
        pytest.fail(f"{words}, and CI must not skip its tests")
    pytest.skip(f"NOT TESTED ON POSTGRESQL: {words}")


class Server:
    """A server with a cluster in `folder`, reached through a socket there."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        # The server refuses to run as root; its package creates this user.
        self._user = "postgres" if os.geteuid() == 0 else None
        self._environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
        self._process: subprocess.Popen[bytes]
        if self._user:
            shutil.chown(folder, self._user)
        words = ("-D", folder / "data", "-U", "quasar", "-A", "trust", "--no-sync")
        subprocess.run(
            [programs / "initdb", *words],
            check=True,
            capture_output=True,
            user=self._user,
            cwd=folder,
            env=self._environment,
        )
        with (folder / "data/postgresql.conf").open("a") as file:
            file.write(f"{SETTINGS}unix_socket_directories='{folder}'\n")

    def start(self) -> None:
        """Start the server and wait for it; it ends with the calling thread."""
        # QUIT ends all its processes at once; KILL would leave its shared memory.
        tied = ("setpriv", "--pdeathsig", "QUIT", "--")
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*tied, self._programs / "postgres", "-D", self._folder / "data"],
                user=self._user,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + HANG
        ready: list[str | Path] = [self._programs / "pg_isready", "-q", "-h", self._folder]
        while subprocess.run(ready, check=False).returncode != 0:
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline, (self._folder / "log").read_text()
            time.sleep(0.05)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """End the server: by SIGINT with all connections, by SIGQUIT as in a crash."""
        self._process.send_signal(number)
        self._process.wait(HANG)

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"quasar{next(_numbers)}"
        self._sql("postgres", f"CREATE DATABASE {name}")
        return f"postgresql://quasar@/{name}?host={self._folder}"

    def run_file(self, url: str, path: Path) -> None:
        """Run an SQL file on the database of the URL."""
        self._sql(url.partition("?")[0].rpartition("/")[2], path.read_text())

    def _sql(self, database: str, text: str) -> None:
        command = [str(self._programs / "psql"), "-qX", "-v", "ON_ERROR_STOP=1", "-U", "quasar"]
        place = ["-h", str(self._folder), "-d", database]
        subprocess.run([*command, *place], input=text, text=True, check=True, capture_output=True)


@contextmanager
def serve_or_skip() -> Iterator[Server]:
    """Run a server in a temporary folder; skip if none is installed."""
    programs = programs_or_skip()
    with tempfile.TemporaryDirectory(
        prefix="pg-", dir="/tmp"
    ) as name:  # socket paths must be short
        server = Server(programs, Path(name))
        server.start()
        try:
            yield server
        finally:
            server.stop()
