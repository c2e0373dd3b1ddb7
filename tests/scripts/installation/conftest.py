"""Checkouts before, during and after the installation."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.processes import wait_for
from tests.scripts.installation.checkout import Checkout


@pytest.fixture(scope="session", autouse=True)
def _quick_environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make virtual environments by copying one, which is 20 times faster."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder / "made", symlinks=True)
    (site,) = (folder / "made").glob("lib/python*/site-packages")
    for package in ("pip", f"pip-{metadata.version('pip')}.dist-info"):  # slow to unpack
        shutil.copytree(Path(sysconfig.get_path("purelib"), package), site / package)
    python = folder / "python"
    copied = f'[ "$1 $2" != "-m venv" ] || exec cp -a "{folder}/made/." "$3"'
    python.write_text(f'#!/bin/sh\n{copied}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkout, "python", str(python))
        yield


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout that was started once, with a virtual environment made by Python."""
    made = Checkout(tmp_path_factory.mktemp("installed"))
    status, _, err = made.run(PYTHON=sys.executable)
    assert status == 0, err
    return made


@pytest.fixture
def hanging(checkout: Checkout) -> Iterator[subprocess.Popen[str]]:
    """A start whose installation hangs."""
    (checkout.root / "hang").touch()
    process = checkout.start()
    wait_for(checkout.builds, child=process)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
