"""The start scripts: real virtual environments, real pip, a project without dependencies."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests import PROJECT
from tests.processes import HANG, run
from tests.scripts.installation.checkout import Checkout


def test_a_second_start_installs_nothing_and_says_nothing(installed: Checkout) -> None:
    before = installed.builds()
    status, out, err = installed.run("--netuid", "24", "two words")
    assert (status, err) == (0, "")
    _, folder, arguments, _ = json.loads(out)
    assert arguments == ["--netuid", "24", "two words"]
    assert folder == str(installed.root)
    assert installed.builds() == before


def test_row_15_the_script_becomes_python_so_that_a_signal_arrives(installed: Checkout) -> None:
    process = installed.start("wait")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())[0] == process.pid
    process.terminate()
    process.communicate(timeout=HANG)
    assert process.returncode == 7


def test_row_31_dotenv_is_not_evaluated(installed: Checkout) -> None:
    (installed.root / ".env").write_text("PLANTED=$(touch planted)\ntouch planted\n")
    status, out, _ = installed.run()
    assert status == 0
    assert json.loads(out)[3] is None
    assert not (installed.root / "planted").exists()


def test_starts_at_the_same_time_install_once(
    checkout: Checkout, hanging: subprocess.Popen[str]
) -> None:
    second = checkout.start()
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    (checkout.root / "hang").unlink()
    for process in (hanging, second):
        _, err = process.communicate(timeout=HANG)
        assert process.returncode == 0, err
    assert checkout.builds() == 1


def test_looking_installs_nothing(checkout: Checkout) -> None:
    for words in (["status"], ["help", "status"], ["--version"]):
        status, out, err = checkout.run(*words)
        assert (status, err) == (0, "")
        assert "./START_MINER.sh once" in out
    assert not (checkout.root / ".venv").exists()


def test_looking_updates_nothing(installed: Checkout) -> None:
    lock, before = installed.root / "requirements/lock.txt", installed.builds()
    text = lock.read_text()
    lock.write_text(text + "# changed\n")
    try:
        assert json.loads(installed.run("status")[1])[2] == ["status"]
    finally:
        lock.write_text(text)
    assert installed.builds() == before


def test_a_moved_checkout_keeps_its_installation(installed: Checkout) -> None:
    before, old = installed.builds(), installed.root
    for place in (installed.home / "moved here", old):
        came_from, installed.root = installed.root, installed.root.rename(place)
        status, out, err = installed.run()
        assert (status, json.loads(out)[1]) == (0, str(installed.root))
        assert f"was moved here from {came_from}" in err
        assert installed.run()[2] == ""  # once is enough
        site = installed.root.glob(".venv/lib/*/*/*.pth")
        assert run("grep", "-rIl", came_from, installed.root / ".venv/bin", *site).stdout == ""
    assert installed.builds() == before


@pytest.mark.parametrize("name", ["MINER", "SERVER", "VALIDATOR", "MINER_INFERENCE"])
def test_each_start_script_execs_a_module_that_exists(name: str) -> None:
    last = (PROJECT / f"START_{name}.sh").read_text().splitlines()[-1]
    command, python, flag, module, arguments = last.split()
    assert (command, python, flag, arguments) == ("exec", ".venv/bin/python", "-m", '"$@"')
    path = PROJECT / module.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
