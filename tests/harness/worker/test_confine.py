"""What code under test can reach of the process that started its worker, as an ordinary user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.worker.subject.confine import landlock_version
from tests import PROJECT
from tests.processes import HANG

LOOK = """
import os, sys
from harness.measuring.process import hide
from harness.worker.subject import confine
hidden, version = map(int, sys.argv[1:])
confine.landlock_version = lambda: version
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
hide(hidden=bool(hidden))
runner, (_, result) = os.getpid(), os.pipe()
if os.fork() == 0:
    os.close(result)
    hide(hidden=False)
    confine.give_up_privileges()
    try:
        os.write(os.open(f"/proc/{runner}/fd/{result}", os.O_WRONLY), b"forged")
        print("written", flush=True)
    except PermissionError:
        print("refused", flush=True)
    os._exit(0)
os.wait()
"""


def run(code: str, *arguments: int, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        cwd=cwd,
    )


def look(*, hidden: bool, version: int) -> str:
    """Return what a subject's attempt to write to its runner's result pipe comes to."""
    done = run(LOOK, int(hidden), version)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(landlock_version() < 6, reason="needs a Linux that has all versions")
@pytest.mark.parametrize("version", [2, 3, 4, 5, 6])
def test_every_version_of_landlock_closes_the_runners_descriptors(version: int) -> None:
    assert look(hidden=False, version=version) == "refused"


@pytest.mark.skipif(landlock_version() < 6, reason="needs a Linux that has all versions")
@pytest.mark.parametrize("version", [1, 2, 5, 6])
def test_a_confined_process_may_rename_a_file_to_another_folder(version, tmp_path):
    """Triton's cache does, and Landlock forbids it to a domain that does not allow it."""
    code = (
        "import os, sys\n"
        "from harness.worker.subject import confine\n"
        "confine.landlock_version = lambda: int(sys.argv[1])\n"
        "confine.give_up_privileges()\n"
        "os.makedirs('a'); os.makedirs('b'); open('a/f', 'w').close(); os.replace('a/f', 'b/f')\n"
    )
    done = run(code, version, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_root_can_no_longer_slow_the_clock() -> None:
    code = (
        "import time\n"
        "from harness.worker.subject import confine\n"
        "confine.give_up_privileges()\n"
        "time.clock_settime(time.CLOCK_REALTIME, time.time())\n"
    )
    done = run(code)
    assert "PermissionError" in done.stderr


@pytest.mark.skipif(landlock_version() < 2, reason="needs Landlock")
def test_a_domain_of_landlocks_first_version_would_break_tritons_cache(tmp_path: Path) -> None:
    """It forbids renames to other folders, whatever right it is made of."""
    code = (
        "import ctypes, os\n"
        "from harness.worker.subject import confine\n"
        "os.makedirs('a/b'); open('a/b/f', 'w').close()\n"
        "libc, right = confine._libc(), ctypes.c_uint64(1 << 11)\n"  # MAKE_BLOCK, for root alone
        "libc.prctl(confine._PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)\n"
        "made = libc.syscall(confine._LANDLOCK_CREATE_RULESET, ctypes.byref(right),"
        " ctypes.c_size_t(8), 0)\n"
        "assert libc.syscall(confine._LANDLOCK_RESTRICT_SELF, made, 0) == 0\n"
        "os.replace('a/b/f', 'a/f')\n"
    )
    done = run(code, cwd=tmp_path)
    assert "Invalid cross-device link" in done.stderr


def test_without_landlock_a_hidden_runner_is_closed_all_the_same() -> None:
    assert look(hidden=False, version=0) == "written", "this test could not fail"
    assert look(hidden=True, version=0) == "refused"


def test_who_starts_a_worker_is_hidden() -> None:
    code = (
        "import ctypes, sys, threading\n"
        "from pathlib import Path\n"
        "from harness.measuring.process import run_supervised\n"
        "run_supervised(['true'], message=lambda fd: b'', env={}, cwd=Path('/'), timeout=9)\n"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))\n"  # PR_GET_DUMPABLE
    )
    done = run(code)
    assert done.stdout.strip() == "0", done.stderr
