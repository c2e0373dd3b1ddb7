"""Programs that attack the validator from the real sandbox: none succeeds.

Without a sandbox on this machine they are skipped; test_validator.py tests that the validator then
does not start. Attacks on the measurement are in tests/harness/measuring and tests/adversarial.
"""

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from harness.measuring.process import run_supervised
from neurons.validator import sandbox as module
from neurons.validator.sandbox import Sandbox
from tests.processes import HANG, is_alive, wait_for

MARKER = f"3661.{os.getpid()}"
"""Seconds for which a daemon sleeps; they identify its command line and this process."""

ATTACKS = {
    "reads the environment": (
        "secret = open('/proc/{pid}/environ').read()",
        r"(FileNotFound|Permission)Error: .*/proc/\d+/environ",
    ),
    "reads the wallet": ("open({hotkey!r}).read()", r"FileNotFoundError: .*/hotkey"),
    "calls out": (
        "import socket; socket.create_connection(('127.0.0.1', {port}), 600)",
        r"ConnectionRefusedError|OSError: .*unreachable",
    ),
    "forks a bomb": (
        "import os, time\n"
        "for _ in range(100000):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(3600)\n",
        r"it started more than \d+ processes|it used more than 1\.0 GiB of memory",
    ),
    "fills the disk": (
        "for number in range(100):\n"
        "    with open(f'fill-{{number}}', 'wb') as file:\n"
        "        for _ in range(1024): file.write(bytes(2**20))\n",
        r"OSError: \[Errno 28\] No space left on device",
    ),
    "takes the memory": (
        "import time\nheld = [b'x' * 2**27 for _ in range(12)]\ntime.sleep(3600)\n",
        r"it used more than 1\.0 GiB of memory",
    ),
    "lets the kernel end others first": (
        "file = '/proc/self/oom_score_adj'\n"
        "print(open(file).read(), flush=True)\n"
        "open(file, 'wb', 0).write(b'0')\n",
        r"^1000\n[\s\S]*Read-only file system",
    ),
    "leaves a daemon behind": (
        "import os\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execvp('sleep', ['sleep', '{marker}'])\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "raise RuntimeError('the daemon waits')\n",
        r"RuntimeError: the daemon waits",
    ),
    "kills its parent": (
        "import os, signal\n"
        "for pid in (os.getppid(), {pid}):\n"
        "    try: os.kill(pid, signal.SIGKILL)\n"
        "    except (PermissionError, ProcessLookupError): pass\n"
        "raise RuntimeError('still here')\n",
        r"RuntimeError: still here",
    ),
}
"""Programs, and what ends each."""


def end_of(text: str, sandbox: Sandbox, folder: Path) -> str:
    """Run a program in the sandbox; return its output and the limit that it exceeds."""
    folder.mkdir()
    ended = run_supervised(
        sandbox.command([sys.executable, "-I", "-S", "-c", text], {}, folder, []),
        message=lambda _: b"",
        env={"PATH": os.environ["PATH"]},
        cwd=folder,
        timeout=HANG,
        exceeded=sandbox.exceeded,
    )
    return f"{ended.log_tail}{ended.exceeded}"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails(name, sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FOLDER_BYTES", 2**26)
    small = Sandbox(sandbox.bubblewrap, 2**30)
    text, end = ATTACKS[name]
    (tmp_path / "hotkey").touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        place = {"hotkey": str(tmp_path / "hotkey"), "port": listener.getsockname()[1]}
        text = text.format(**place, pid=os.getpid(), marker=MARKER)
        result = end_of(text, small, tmp_path / "inside")
        with pytest.raises(BlockingIOError):  # no connection waits
            listener.accept()
    assert re.search(end, result), result
    wait_for(lambda: not sleeping())


def sleeping() -> list[Path]:
    """Return the processes with the marker; the kernel may still be ending some."""
    return [
        entry
        for entry in Path("/proc").glob("[0-9]*")
        if MARKER.encode() in read_or_nothing(entry / "cmdline") and is_alive(int(entry.name))
    ]


HIDING = {
    "memory files": "held = [os.memfd_create('m') for _ in range(12)]\n"
    "for one in held: os.truncate(one, 2**24); os.posix_fallocate(one, 0, 2**24)\n",
    "its folder": "for one in range(12):\n"
    "    with open(str(one), 'wb') as file: file.write(bytes(2**24))\n",
    "sockets": "import socket\n"
    "held = [one for _ in range(1000) for one in socket.socketpair()]\n"
    "for one in held:\n"
    "    one.setblocking(False)\n"
    "    try:\n"
    "        while True: one.send(bytes(2**16))\n"
    "    except BlockingIOError: pass\n",
    "page tables": "import mmap\n"
    "held = mmap.mmap(-1, 2**45, mmap.MAP_PRIVATE | 0x4000, mmap.PROT_READ)  # NORESERVE\n"
    "for at in range(0, 2**37, 2**21): held[at]\n",
    "shared pages": "import mmap\nheld = mmap.mmap(-1, 2**28)\nheld.write(b'x' * 3 * 2**26)\n",
}
"""Programs that take 192 MiB in memory that is not private to a process."""


@pytest.mark.parametrize("name", HIDING)
def test_memory_that_is_not_private_counts(name, sandbox, tmp_path):
    text = f"import os, time\n{HIDING[name]}print('done', flush=True)\ntime.sleep(3600)\n"
    small = Sandbox(sandbox.bubblewrap, 2**27)
    assert end_of(text, small, tmp_path / "inside").endswith("it used more than 0.1 GiB of memory")


def read_or_nothing(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
