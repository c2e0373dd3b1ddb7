"""What code under test can reach of the process that started its worker, as an ordinary user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.worker.subject.confine import landlock_version
from tests import PROJECT

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


def look(*, hidden: bool, version: int) -> str:
    """Return what a subject's attempt to write to its runner's result pipe comes to."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(int(hidden)), str(version)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(landlock_version() < 6, reason="needs a Linux that has all versions")
@pytest.mark.parametrize("version", [2, 3, 4, 5, 6])
def test_every_version_of_landlock_closes_the_runners_descriptors(version: int) -> None:
    assert look(hidden=False, version=version) == "refused"


@pytest.mark.skipif(landlock_version() < 6, reason="needs a Linux that has all versions")
@pytest.mark.parametrize("version", [1, 2, 5, 6])
def test_a_confined_process_may_rename_a_file_to_another_folder(
    version: int, tmp_path: Path
) -> None:
    """Triton's cache does, and Landlock forbids it to a domain that does not allow it."""
    code = (
        "import os, sys\n"
        "from harness.worker.subject import confine\n"
        "confine.landlock_version = lambda: int(sys.argv[1])\n"
        "confine.give_up_privileges()\n"
        "os.makedirs('a'); os.makedirs('b'); open('a/f', 'w').close(); os.replace('a/f', 'b/f')\n"
    )
    env = os.environ | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(version)],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


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
    env = os.environ | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "0", done.stderr
