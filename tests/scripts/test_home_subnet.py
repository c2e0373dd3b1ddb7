"""The home subnet of docs/subnet.md: three processes by their start scripts, one verdict."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

import pytest

from tests import PROJECT
from tests.processes import run_python
from tests.small_host import install_small_host

SCRIPT = PROJECT / "scripts/home_subnet.py"


@pytest.mark.slow
@pytest.mark.skipif(
    not (PROJECT / ".venv/quasar-install").exists(), reason="the start scripts would install first"
)
def test_separate_processes_reach_a_verdict(tmp_path):
    short = {"TARGET_SEQUENCE_LENGTH": "512", "CLAIM_RUNS": "1", "DEVICE": "cpu"}
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CLAIM_HEADROOM": "0.7"}
    bare["PYTHONPATH"] = f"{install_small_host(tmp_path / 'host')}:{PROJECT}"
    done = run_python(SCRIPT, tmp_path / "home", "--once", env={**bare, **short})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VALIDATED, rank 1" in done.stdout
    assert "Traceback" not in (tmp_path / "home/server.log").read_text()
    assert " verdict " in (tmp_path / "home/validator.log").read_text()


def port_of(file: Path) -> str:
    """Return the port that the settings name."""
    return next(line for line in file.read_text().splitlines() if line.startswith("PORT="))[5:]


def test_the_commands_are_said_with_their_settings(tmp_path):
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    first, second = (run_python(SCRIPT, tmp_path / "home", env=env, check=True) for _ in range(2))
    assert first.stdout == second.stdout  # what was made is not made anew
    _, *commands, last = first.stdout.splitlines()
    assert f" http://127.0.0.1:{port_of(tmp_path / 'home/home.env')};" in last
    lines = [shlex.split(line) for line in commands]
    assert [words[-1] for words in lines] == ["./START_SERVER.sh", "./START_VALIDATOR.sh", "once"]
    file = tmp_path / "home/home.env"
    assert all(f"ENV_FILE={file}" in words for words in lines)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "notes").touch()
    done = run_python(SCRIPT, tmp_path / "notes")
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path}/notes cannot be used (File exists). Name another folder.\n"
