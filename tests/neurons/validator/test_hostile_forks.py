"""Forks that attack the validator from the real sandbox: none succeeds, and each verdict says why.

Without a sandbox on this machine they are skipped; test_sandbox.py proves that the validator then
does not start.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import pytest

from harness.measuring.runner import MeasurementError, Options, check_import, measure
from neurons.runtime.identity import create_throwaway
from neurons.validator.attempts import Attempts
from neurons.validator.sandbox import Sandbox
from neurons.wire.protocol import QueuedSubmission
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
        r"crash\): FileNotFoundError: .*hotkeys/default",
    ),
    "reads the parent's memory": (
        "open('/proc/{pid}/mem', 'rb').read(1)",
        r"crash\): (FileNotFound|Permission)Error: .*/proc/\d+/mem",
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
    "takes every core": (
        "import os\nos.sched_setaffinity(0, range(os.cpu_count()))\n",
        r"crash\): PermissionError",
    ),
    "writes a result of its own": (
        "import os\n"
        "for fd in range(3, 64):\n"
        '    try: os.write(fd, b\'{{"nonce": "0", "body": {{"tokens_per_sec": 9e9}}}}\\n\')\n'
        "    except OSError: pass\n"
        "os._exit(0)\n",
        r"protocol\): the worker's answer is malformed",
    ),
    "stops the clock": (
        "import time\nbegun = time.time()\ntime.time = lambda: begun\n",
        r"gate\): the code under test replaced time.time",
    ),
    "patches torch": (
        "import torch\ntorch.randn = lambda *a, **k: torch.zeros(*a, **k)\n",
        r"gate\): the code under test replaced torch.randn",
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
    "signs a verdict for itself": (
        "import json, sys\n"
        "sys.path.append('/')\n"
        "from bittensor.sp_core import Keypair\n"
        "key = json.load(open({hotkey!r}))['secretSeed']\n"
        "print(Keypair.create_from_seed(key).sign(b'score 1.0'))\n",
        r"crash\): FileNotFoundError: .*hotkeys/default",
    ),
    "rewrites the validator's notes": (
        "import sqlite3\nsqlite3.connect({state!r}).execute('DELETE FROM attempts')\n",
        r"crash\): OperationalError: unable to open database file",
    ),
    "hangs": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)\n",
        r"timeout\): not done within",
    ),
    "ends without a word": (
        "import os\nos._exit(0)\n",
        r"protocol\): the worker ended without a result",
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
    """Measure an honest tree that attacks when it is imported; return the verdict's reason."""
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
        if "lambda" in text:  # an attack on the measurement itself
            options = Options("cpu", confinement=sandbox)
            measure(folder, 16, options, cross_check=False)
        else:  # most attacks end at the import, so the measurement is left out
            timeout = 3.0 if "SIG_IGN" in text else HANG
            check_import(folder, Options("cpu", timeout, confinement=sandbox))
    except MeasurementError as error:
        return f"No measurement ({error.kind}): {error.reason}"
    return "measured"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, sandbox: Sandbox) -> Iterator[Outcome]:
    """All attacks, two at a time."""
    folder = tmp_path_factory.mktemp("hostile")
    os.environ["OMP_NUM_THREADS"] = "1"
    create_throwaway(folder / "wallets", "validator")
    notes = Attempts(folder / "attempts.sqlite", "https://api")
    row = QueuedSubmission(id=1, miner_hotkey="5", target_sequence_length=16, created_at="2026")
    notes.begin(row)
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
            "hotkey": str(folder / "wallets/validator/hotkeys/default"),
            "state": str(folder / "attempts.sqlite"),
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
    yield Outcome(dict(zip(texts, reasons, strict=True)), connections)
    notes.close()


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
