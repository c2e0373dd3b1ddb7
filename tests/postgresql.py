"""A real PostgreSQL server for a run of tests; where none is installed they are skipped."""

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
"""No test loses power."""

_numbers = count()

on_both = pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
"""Runs a test of the validator API on databases of both kinds."""


def programs_or_skip() -> Path:
    """Return the folder of the newest server's programs; skip without one. CI never skips."""
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if folders:
        return max(folders, key=lambda folder: float(folder.parent.name))
    elsewhere = shutil.which("initdb")
    if elsewhere:
        return Path(elsewhere).resolve().parent
    words = "PostgreSQL is not installed (Debian: apt install postgresql)"
    if os.environ.get("CI"):
        pytest.fail(f"{words}, and CI must not leave its tests out")
    pytest.skip(f"NOT TESTED ON POSTGRESQL: {words}")


class Server:
    """A server with a cluster in `folder`, reached through a socket there."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        # The server refuses to run as root; its package makes this user.
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
        """Start it and wait until it answers; the kernel ends it with the thread that called."""
        # QUIT ends all of the server at once, where KILL would leave its shared memory.
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
        """End it by a signal: SIGINT ends every connection, SIGQUIT leaves it as a crash would."""
        self._process.send_signal(number)
        self._process.wait(HANG)

    def new_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"quasar{next(_numbers)}"
        self._sql("postgres", f"CREATE DATABASE {name}")
        return f"postgresql://quasar@/{name}?host={self._folder}"

    def run_script(self, url: str, script: str) -> None:
        """Run SQL statements on the database of the URL."""
        self._sql(url.partition("?")[0].rpartition("/")[2], script)

    def _sql(self, database: str, text: str) -> None:
        command = [str(self._programs / "psql"), "-qX", "-v", "ON_ERROR_STOP=1", "-U", "quasar"]
        place = ["-h", str(self._folder), "-d", database]
        subprocess.run([*command, *place], input=text, text=True, check=True, capture_output=True)


@contextmanager
def serve_or_skip() -> Iterator[Server]:
    """Run a server in a folder that is deleted afterwards; skip where none is installed."""
    programs = programs_or_skip()
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as name:  # a socket has a short path
        server = Server(programs, Path(name))
        server.start()
        try:
            yield server
        finally:
            server.stop()
