"""Forks that attack the validator from the real sandbox: none succeeds, and each verdict says why.

Without a sandbox on this machine they are skipped; test_sandbox.py proves that the validator then
does not start. Attacks on the measurement are in tests/harness/measuring/test_runner.py.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import pytest

from harness.measuring.runner import MeasurementError, Options, check_import
from neurons.validator.sandbox import Sandbox
from tests import PROJECT
from tests.processes import HANG, is_alive
from tests.repositories import write_files

HONEST = (PROJECT / "tests/harness/honest.py").read_text()
LAYER = "from fla.ops.quasar.chunk import QuasarAttention, chunk_quasar\n"

ATTACKS = {
    "reads the environment": (
        "secret = open('/proc/{pid}/environ').read()",
        r"crash\): (FileNotFound|Permission)Error: .*/proc/\d+/environ",
    ),
    "reads the wallet": (
        "open({hotkey!r}).read()",
        r"crash\): FileNotFoundError: .*/hotkey",
    ),
    "calls out": (
        "import socket; socket.create_connection(('127.0.0.1', {port}), 600)",
        r"crash\): ConnectionRefusedError|crash\): OSError: .*unreachable",
    ),
    "forks a bomb": (
        "import os, time\n"
        "for _ in range(100000):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(3600)\n",
        r"limit\): it (started more than \d+ processes|took more than 2\.5 GiB of memory)",
    ),
    "fills the disk": (
        "import os\n"
        "for number in range(100):\n"
        "    with open(f'fill-{{number}}', 'wb') as file:\n"
        "        for _ in range(1024): file.write(bytes(2**20))\n",
        r"crash\): OSError: \[Errno 28\] No space left on device",
    ),
    "takes the memory": (
        "import time\nheld = [b'x' * 2**28 for _ in range(12)]\ntime.sleep(3600)\n",
        r"limit\): it took more than 2\.5 GiB of memory",
    ),
    "leaves a daemon behind": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execvp('sleep', ['sleep', '{marker}'])\n"
        "    os._exit(0)\n"
        "time.sleep(0.2)\n"
        "raise RuntimeError('the daemon waits')\n",
        r"crash\): RuntimeError: the daemon waits",
    ),
    "kills its parent": (
        "import os, signal\n"
        "for pid in (os.getppid(), {pid}):\n"
        "    try: os.kill(pid, signal.SIGKILL)\n"
        "    except ProcessLookupError: pass\n"
        "os.kill(-1, signal.SIGKILL)\n",
        r"crash\): PermissionError: \[Errno 1\]|out_of_memory\): the worker was killed",
    ),
}

MARKER = "3661.25"
"""Seconds for which the daemon sleeps; they identify its command line."""


@dataclass
class Outcome:
    """The results of the attacks."""

    reasons: dict[str, str]  # the verdict's reason, by attack
    connections: list[object]  # that reached a server outside the sandbox


def attack(folder: Path, text: str, sandbox: Sandbox) -> str:
    """Import an honest tree that attacks meanwhile; return the verdict's reason."""
    write_files(
        folder,
        {
            **dict.fromkeys(
                ("fla/__init__.py", "fla/layers/__init__.py", "fla/ops/__init__.py"), ""
            ),
            "fla/ops/quasar/__init__.py": text,
            "fla/ops/quasar/chunk.py": HONEST,
            "fla/layers/quasar.py": LAYER,
        },
    )
    try:
        check_import(folder, Options("cpu", HANG, confinement=sandbox))
    except MeasurementError as error:
        return f"No measurement ({error.kind}): {error.reason}"
    return "imported"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, sandbox: Sandbox) -> Outcome:
    """All attacks, two at a time."""
    folder = tmp_path_factory.mktemp("hostile")
    os.environ["OMP_NUM_THREADS"] = "1"
    (folder / "hotkey").touch()
    connections: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connections.append(listener.accept())
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        place = {
            "hotkey": str(folder / "hotkey"),
            "port": listener.getsockname()[1],
            "pid": os.getpid(),
            "marker": MARKER,
        }
        texts = {name: text.format(**place) for name, (text, _) in ATTACKS.items()}
        every: frozenset[int] = frozenset()  # otherwise two attacks would share the cores for forks
        small = Sandbox(sandbox.bubblewrap, 5 * 2**29, cores=every)
        with ThreadPoolExecutor(2) as pool:
            trees = [folder / f"tree-{number}" for number in range(len(texts))]
            reasons = list(pool.map(attack, trees, texts.values(), repeat(small)))
        listener.shutdown(socket.SHUT_RDWR)
    return Outcome(dict(zip(texts, reasons, strict=True)), connections)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails_and_its_verdict_says_why(name: str, outcome: Outcome) -> None:
    assert re.search(ATTACKS[name][1], outcome.reasons[name]), outcome.reasons[name]


@pytest.mark.slow
def test_attacks_leave_no_connection_and_no_process(outcome: Outcome) -> None:
    assert outcome.connections == []
    sleeping = [
        entry
        for entry in Path("/proc").glob("[0-9]*")
        if MARKER.encode() in read_or_nothing(entry / "cmdline") and is_alive(int(entry.name))
    ]
    assert sleeping == []


def read_or_nothing(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
