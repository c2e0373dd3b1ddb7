"""Make a subnet of separate processes on this machine: hotkeys, a fork's upstream and one .env.

    .venv/bin/python scripts/home_subnet.py FOLDER [--once]

Nothing leaves the machine. It prints the three commands, each for a terminal of its own; with
--once it starts them itself, waits for the verdict of one cycle, and stops them. Exit status 0:
VALIDATED.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from neurons.embedded.upstream import make_upstream
from neurons.runtime.errors import QuasarError
from neurons.runtime.identity import create_throwaway
from neurons.runtime.machine import resolve_device
from neurons.runtime.values import PROJECT

READY_SECONDS = 120.0
CPU = {"TARGET_SEQUENCE_LENGTH": "2048", "CLAIM_RUNS": "2", "CLAIM_HEADROOM": "0.5"}
"""What a CPU can measure; its timings vary, so that a claim keeps well below them."""


def write_settings(folder: Path) -> Path:
    """Make what the three processes need under `folder`; return their .env, an old one as it is."""
    file = folder / "home.env"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    wallets = folder / "wallets"
    create_throwaway(wallets, "miner")
    validator = create_throwaway(wallets, "validator")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {
        "VALIDATOR_API_URL": f"http://127.0.0.1:{port}",
        "PORT": str(port),
        "VALIDATOR_HOTKEYS": validator.hotkey,
        "BLOCKS_UNTIL_REVEAL": "1",
        "POLLING_INTERVAL": "5",
        "WALLET_PATH": str(wallets),
        "WALLET_MINER_NAME": "miner",
        "WALLET_VALIDATOR_NAME": "validator",
        "SUBTENSOR_NETWORK": "offline",
        "ALLOW_FILE_FORKS": "true",
        "SANDBOX": "preferred",  # it judges this subnet's own fork alone
        "FORK_REMOTE": str(folder / "fork.git"),
        "FORK_UPSTREAM_URL": make_upstream(folder / "upstream.git"),
        "STATE_DIR": str(folder / "state"),
        **(CPU if resolve_device("auto") == "cpu" else {}),
    }
    file.touch(mode=0o600)
    file.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return file


def settings_of(file: Path) -> dict[str, str]:
    """Return the lines of a .env that `write_settings` wrote."""
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


@contextmanager
def started(
    script: str, environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a start script with its output in `log`, and stop it where the block is left."""
    with log.open("ab") as out:
        process = subprocess.Popen([PROJECT / script], env=environment, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_once(file: Path) -> int:
    """Start server and validator, run one cycle of the miner, and return its exit status."""
    environment = {**os.environ, "ENV_FILE": str(file), "OMP_NUM_THREADS": "1"}
    url = settings_of(file)["VALIDATOR_API_URL"]
    with started("START_SERVER.sh", environment, file.parent / "server.log") as server:
        wait_for_server(url, server)
        with started("START_VALIDATOR.sh", environment, file.parent / "validator.log"):
            return subprocess.run([PROJECT / "START_MINER.sh", "once"], env=environment).returncode


def wait_for_server(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return when it answers.

    Raises:
        QuasarError: it has ended, or does not answer in time.
    """
    deadline = time.monotonic() + READY_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise QuasarError(f"The server at {url} does not answer; its log is server.log in FOLDER.")


def main() -> int:
    """Make the subnet; say how to start it, or start it for one cycle."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where everything of this subnet lies")
    parser.add_argument("--once", action="store_true", help="run one cycle with all three")
    given = parser.parse_args()
    try:
        file = write_settings(given.folder.absolute())
        if given.once:
            return run_once(file)
    except QuasarError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(
            f"{given.folder} cannot be used ({error.strerror}). Name another folder.\n"
        )
        return 1
    print(f"settings and hotkeys are in {given.folder}; one terminal for each, in this order:")
    threads = "OMP_NUM_THREADS=1 " if resolve_device("auto") == "cpu" else ""
    for script in ("START_SERVER.sh", "START_VALIDATOR.sh", "START_MINER.sh once"):
        print(f"  {threads}ENV_FILE={file} ./{script}")
    url = settings_of(file)["VALIDATOR_API_URL"]
    print(f"the leaderboard is at {url}; Ctrl-C ends server and validator")
    return 0


if __name__ == "__main__":
    sys.exit(main())
