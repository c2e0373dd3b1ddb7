"""The confinement of the subject against the runner, for an ordinary user and for root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.worker.subject.confine import landlock_version
from tests import PROJECT
from tests.processes import HANG

FORGE = """
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
"""A confined subject tries to write to the result pipe of its runner."""


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


def forge(*, hidden: bool, version: int) -> str:
    """Return the outcome of FORGE: `written` or `refused`."""
    done = run(FORGE, int(hidden), version)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(landlock_version() < 6, reason="needs Linux 6.12 for all versions")
@pytest.mark.parametrize("version", [2, 5, 6])
def test_every_version_of_landlock_closes_the_runners_descriptors(version: int) -> None:
    assert forge(hidden=False, version=version) == "refused"


@pytest.mark.skipif(landlock_version() < 6, reason="needs Linux 6.12 for all versions")
@pytest.mark.parametrize("version", [1, 2, 5, 6])
def test_a_confined_process_may_rename_a_file_to_another_folder(version, tmp_path):
    """Triton's cache does this; a Landlock domain forbids it unless a rule allows it."""
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
def test_root_loses_the_right_to_set_the_clock() -> None:
    code = (
        "import time\n"
        "from harness.worker.subject import confine\n"
        "confine.give_up_privileges()\n"
        "time.clock_settime(time.CLOCK_REALTIME, time.time())\n"
    )
    done = run(code)
    assert "PermissionError" in done.stderr


def test_without_landlock_only_a_hidden_runner_is_protected() -> None:
    assert forge(hidden=False, version=0) == "written"
    assert forge(hidden=True, version=0) == "refused"


def test_a_process_that_starts_a_worker_is_hidden() -> None:
    code = (
        "import ctypes, sys, threading\n"
        "from pathlib import Path\n"
        "from harness.measuring.process import run_supervised\n"
        "run_supervised(['true'], message=lambda fd: b'', env={}, cwd=Path('/'), timeout=9)\n"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))\n"  # PR_GET_DUMPABLE
    )
    done = run(code)
    assert done.stdout.strip() == "0", done.stderr


OLD_LINUX = """
import os
from harness.worker.failures import WorkerError
from harness.worker.subject.serve import fork_subject
os.closerange = None
mine, theirs = os.pipe()
subject = fork_subject()
os.close(theirs)
try:
    subject.ask("load", tree="/none")
except WorkerError as error:
    print(error, os.read(mine, 1))
subject.end()
"""


def test_the_subject_closes_its_descriptors_without_trying_every_number() -> None:
    """Before Linux 5.9, `closerange` takes minutes if 2**30 files may be open."""
    done = run(OLD_LINUX)
    assert "No module named 'fla" in done.stdout, done.stderr  # the subject answers
    assert done.stdout.endswith(" b''\n")  # and has closed the pipe's other end
