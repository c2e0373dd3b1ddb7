"""A PostgreSQL server of one's own, from the system's packages, that ends with its parent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from neurons.runtime.errors import ConfigError, Problem, QuasarError
from neurons.runtime.loading import environment

PACKAGES = Path("/usr/lib/postgresql")
INSTALL_SERVER = "apt install postgresql"
SERVICE_USER = "postgres"
"""The server refuses to run as root; the package makes this user for it."""
SETTINGS = "max_connections=100\nlisten_addresses=''\n"
START_SECONDS, STOP_SECONDS = 60.0, 20.0

_numbers = count()


def find_programs() -> Path | None:
    """Return the folder of initdb and postgres, of the newest version installed."""
    folders = [path.parent for path in PACKAGES.glob("*/bin/initdb")]
    if folders:
        return max(folders, key=lambda folder: float(folder.parent.name))
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def find_lack() -> str | None:
    """Return what to do before a server can run here and be used, None where nothing is lacking."""
    if find_programs() is None:
        return INSTALL_SERVER
    if find_spec("psycopg") is None:
        return "scripts/install.sh postgresql"
    return None


class Server:
    """A server on a cluster of its own, reached through a socket in its folder.

    Attributes:
        process: the server's main process, once it was started.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self._user = SERVICE_USER if os.geteuid() == 0 else None
        self._environment = {"PATH": environment()["PATH"], "LC_ALL": "C.UTF-8"}
        self.process: subprocess.Popen[bytes]

    def make(self, settings: str) -> None:
        """Make an empty cluster, with these lines of postgresql.conf beside our own."""
        if self._user:
            shutil.chown(self._folder, self._user)
        command: list[str | Path] = [self._programs / "initdb", "-D", self._data]
        subprocess.run(
            [*command, "-U", "quasar", "-A", "trust", "--no-sync"],
            check=True,
            capture_output=True,
            user=self._user,
            cwd=self._folder,
            env=self._environment,
        )
        with (self._data / "postgresql.conf").open("a") as file:
            file.write(f"{SETTINGS}{settings}unix_socket_directories='{self._folder}'\n")

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            QuasarError: it does not start; its log is in the text.
        """
        # QUIT ends all of the server at once, where KILL would leave its shared memory.
        tied = ["setpriv", "--pdeathsig", "QUIT", "--"]
        with (self._folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*tied, self._programs / "postgres", "-D", self._data],
                user=self._user,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """End it by a signal: SIGINT ends every connection, SIGQUIT leaves it as a crash would."""
        self.process.send_signal(number)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait()

    def new_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"quasar{next(_numbers)}"
        self._sql("postgres", f"CREATE DATABASE {name}")
        return f"postgresql://quasar@/{name}?host={self._folder}"

    def run_file(self, url: str, path: Path) -> None:
        """Run a file of SQL on the database of the URL."""
        self._sql(url.partition("?")[0].rpartition("/")[2], path.read_text())

    def _sql(self, database: str, text: str) -> None:
        command = [str(self._programs / "psql"), "-qX", "-v", "ON_ERROR_STOP=1", "-U", "quasar"]
        place = ["-h", str(self._folder), "-d", database]
        subprocess.run([*command, *place], input=text, text=True, check=True, capture_output=True)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        ask: list[str | Path] = [self._programs / "pg_isready", "-q", "-h", self._folder]
        while subprocess.run(ask, check=False).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = (self._folder / "log").read_text(errors="replace")[-500:]
                raise QuasarError(f"PostgreSQL does not start: {text}")
            time.sleep(0.05)


@contextmanager
def serve(programs: Path | None = None, settings: str = "") -> Iterator[Server]:
    """Run a server with an empty cluster in a folder that is removed afterwards.

    The kernel stops it when the thread that started it ends, also by SIGKILL; its folder, in
    /tmp, remains then.

    Args:
        programs: from `find_programs`.
        settings: more lines of postgresql.conf.

    Raises:
        ConfigError: no server is installed.
        QuasarError: it does not start; its log is in the text.
    """
    programs = programs or find_programs()
    if programs is None:
        found = "PostgreSQL is not installed."
        raise ConfigError(Problem(found, f"On Debian and Ubuntu: {INSTALL_SERVER}."))
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as name:  # a socket has a short path
        server = Server(programs, Path(name))
        server.make(settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()
