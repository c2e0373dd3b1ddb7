"""The public API and validator as processes, and the repository of the fork."""

import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.servers import free_port

PUBLIC_PARTS = ("validator_api", "neurons", "quasar")
READY_SECONDS = 60.0
STOP_SECONDS = 10.0
DRIVER = Path(__file__).with_name("validator_driver.py")


def bare_environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a child, without settings of this user."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",  # with more threads, timings differ tenfold
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def copy_public_code(subnet: Path, target: Path) -> Path:
    """Copy the parts of the public subnet's checkout that run, without a .env."""
    for part in PUBLIC_PARTS:
        skipped = shutil.ignore_patterns("__pycache__", ".env", "*.db")
        shutil.copytree(subnet / part, target / part, ignore=skipped)
    return target


def mend_api(code: Path) -> str:
    """Repair the SyntaxError of the copied API; return a description, or "" if it compiles.

    The newest public commit moved the `if` of a migration into a `with` and left its `else`
    outside. The block is indented up to the `except` that ends it; no route changes. Raises a
    SyntaxError if that does not help.
    """
    file = code / "validator_api" / "app.py"
    text = file.read_text()
    try:
        compile(text, str(file), "exec")
        return ""
    except SyntaxError as error:
        first = int(error.lineno or 1)
    lines = text.splitlines(keepends=True)
    last = next((n for n in range(first, len(lines)) if lines[n].startswith("except")), first)
    lines[first - 1 : last] = ["    " + line for line in lines[first - 1 : last]]
    compile("".join(lines), str(file), "exec")
    file.write_text("".join(lines))
    return f"app.py does not compile as published; lines {first} to {last} were indented"


def make_bare(checkout: Path, target: Path) -> str:
    """Make a bare repository of a checkout's HEAD; return its file:// address."""
    command = ["git", "clone", "--quiet", "--bare", "--no-local", checkout.absolute().as_uri()]
    subprocess.run([*command, str(target)], check=True, capture_output=True, text=True)
    return target.as_uri()


@dataclass
class Process:
    """A child process in its own group, with a log file."""

    command: list[str]
    environment: dict[str, str]
    cwd: Path
    log_file: Path
    _child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self._child = subprocess.Popen(
                self.command,
                env=self.environment,
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int | None:
        """Return its exit status; None if it still runs after `seconds`."""
        assert self._child is not None, "not started"
        try:
            return self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: signal.Signals) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def stop(self) -> None:
        if self._child is not None:
            self.signal(signal.SIGTERM)
            self.wait(STOP_SECONDS)
            self.signal(signal.SIGKILL)
            self._child.wait()
            self._child = None


class PublicApi:
    """The public API over an SQLite database.

    Attributes:
        url: its address on loopback, which a wipe does not change.
        databases: one for each start; the last one is in use.
    """

    def __init__(self, python: str, code: Path, folder: Path, blocks_until_reveal: int) -> None:
        self._folder, self._code, self._port = folder, code, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [python, "-m", "uvicorn", "validator_api.app:app"]
        self._command += ["--host", "127.0.0.1", "--port", str(self._port)]
        self._blocks, self._changing = str(blocks_until_reveal), threading.Lock()
        self.databases: list[Path] = []
        self._process: Process | None = None

    def start(self) -> None:
        """Start it with an empty database and wait until it answers."""
        self.databases.append(self._folder / f"api-{len(self.databases) + 1}.db")
        environment = bare_environment(
            self._folder,
            DATABASE_URL=f"sqlite:///{self.databases[-1]}",
            BLOCKS_UNTIL_REVEAL=self._blocks,
        )
        log_file = self._folder / "api.log"
        self._process = Process(self._command, environment, self._code, log_file)
        self._process.start()
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._process.wait(0.2) is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
        raise RuntimeError(f"The public API does not start; see {log_file}.")

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def wipe(self) -> None:
        """Restart with an empty database."""
        with self._changing:
            self.stop()
            self.start()

    def turn_round(self) -> None:
        """End the round and open the next one, by a validator's calls."""
        with self._changing:  # a wipe may be under way
            present = self._call("GET", "/get_current_round")
            self._call("POST", f"/finalize_round/{present['id']}")
            self._call("GET", "/get_current_round")

    def _call(self, method: str, route: str) -> Any:
        reply = httpx.request(method, self.url + route, trust_env=False, timeout=30.0)
        reply.raise_for_status()
        return reply.json()


def public_validator(python: str, code: Path, folder: Path, api: str, seconds: float) -> Process:
    """Return the public validator, not started, that judges `api`'s queue every `seconds`."""
    (folder / "validator").mkdir()
    environment = bare_environment(
        folder / "validator",
        VALIDATOR_API_URL=api,
        ENABLE_LOGIT_VERIFICATION="false",
        TMPDIR=str(folder / "validator"),
    )
    command = [python, str(DRIVER), str(code), str(seconds)]
    return Process(command, environment, code, folder / "validator.log")
