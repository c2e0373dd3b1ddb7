"""The start scripts: real virtual environments, real pip, a project without dependencies."""

import json
import os
import re

import click
import pytest

from neurons.miner import __main__ as miner
from neurons.runtime.errors import EX_CONFIG
from quasar_kernels import __version__
from tests import PROJECT
from tests.processes import HANG, run, run_python
from tests.repositories import make_checkout, run_git
from tests.scripts.installation.checkout import Checkout

PROGRAMS = {
    "miner": ("START_MINER.sh", "neurons.miner"),
    "server": ("START_SERVER.sh", "neurons.validator_api"),
    "validator": ("START_VALIDATOR.sh", "neurons.validator"),
    "inference": ("START_MINER_INFERENCE.sh", "neurons.inference_server"),
}
"""The start script and the module of each file in scripts/help."""


def test_a_second_start_installs_and_prints_nothing(installed: Checkout) -> None:
    before = installed.builds()
    status, out, err = installed.run("--netuid", "24", "backup", "two words")
    assert (status, err) == (0, "")
    _, folder, arguments, _ = json.loads(out)
    assert arguments == ["--netuid", "24", "backup", "two words"]
    assert folder == str(installed.root)
    assert installed.builds() == before


def test_row_15_the_script_execs_python(installed: Checkout) -> None:
    process = installed.start(WAIT="1")
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


def test_starts_at_the_same_time_install_once(checkout, hanging):
    second = checkout.start()
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    (checkout.root / "hang").unlink()
    for process in (hanging, second):
        _, err = process.communicate(timeout=HANG)
        assert process.returncode == 0, err
    assert checkout.builds() == 1


def test_commands_that_only_read_install_nothing(checkout: Checkout) -> None:
    for words in (["status"], ["--netuid", "24", "status"], ["help", "status"], ["logs"]):
        status, out, err = checkout.run(*words)
        assert (status, err) == (0, "")
        assert "./START_MINER.sh once" in out
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("name", [*PROGRAMS])
def test_the_help_before_an_installation_is_the_program_s_own(name: str) -> None:
    script, module = PROGRAMS[name]
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    real = run_python("-m", module, "--help", env=env, check=True).stdout
    file = PROJECT / f"scripts/help/{name}.txt"
    assert file.read_text() == real, f"write it: .venv/bin/python -m {module} --help >{file}"
    # without Python on the PATH
    for words in (["--help"], ["-h"]):
        shown = run("/bin/bash", PROJECT / script, *words, env={"PATH": "/usr/bin:/bin"})
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, real, "")


@pytest.mark.parametrize("words", [["help"], ["once", "--help"]])
def test_help_is_shown_before_an_installation(checkout: Checkout, words: list[str]) -> None:
    status, out, err = checkout.run(*words)
    assert (status, err) == (0, "")
    assert out.startswith((PROJECT / "scripts/help/miner.txt").read_text())
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("word", ["version", "--version"])
def test_the_version_before_an_installation_is_the_program_s_own(checkout, word):
    assert checkout.run(word) == (0, f"quasar-miner {__version__}\n", "")
    make_checkout(checkout.root, {})
    real = run_python("-m", "neurons.miner", word, check=True).stdout
    head = run_git(checkout.root, "rev-parse", "HEAD")[:12]
    assert checkout.run(word)[1] == f"quasar-miner {__version__} at {head}\n"
    assert re.fullmatch(rf"quasar-miner {__version__}( at [0-9a-f]{{12}})?\n", real)
    assert run(PROJECT / "START_SERVER.sh", "--version").stdout == real
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["versoin"], "There is no command 'versoin'. Did you mean 'version'?"),
        (
            ["--netuid=24", "--logging.debug", "sttus"],
            "There is no command 'sttus'. Did you mean 'status'?",
        ),
        (["--bogus", "once"], "There is no option '--bogus'."),
        (
            ["--logging.debgu"],
            "There is no option '--logging.debgu'. Did you mean '--logging.debug'?",
        ),
        (["--netiud=24"], "There is no option '--netiud'. Did you mean '--netuid'?"),
        (["--logging.debug=x"], "Option '--logging.debug' takes no value."),
        (["--netuid"], "Option '--netuid' needs a value."),
        (["o.*"], "There is no command 'o.*'."),
    ],
)
def test_usage_errors_are_reported_before_an_installation(checkout, words, message):
    status, out, err = checkout.run(*words)
    assert (status, out) == (EX_CONFIG, "")
    assert err == f"START_MINER.sh: {message} (START_MINER.sh --help lists them)\n"
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("script", ["START_SERVER.sh", "START_VALIDATOR.sh"])
def test_a_server_takes_no_command(script: str) -> None:
    refused = run("/bin/bash", PROJECT / script, "once", env={"PATH": "/usr/bin:/bin"})
    assert refused.returncode == EX_CONFIG
    assert "There is no command 'once'." in refused.stderr


def test_the_script_accepts_every_command_and_flag_of_the_miner(installed: Checkout) -> None:
    options = [one for one in miner.cli.params if isinstance(one, click.Option)]
    known = [flag for one in options if not one.is_flag for flag in one.opts]
    assert len(known) > 5
    words = [word for flag in known for word in (flag, "1")]
    status, out, err = installed.run(*words, "run")
    assert (status, json.loads(out)[2]) == (0, [*words, "run"]), err
    accept = 'for name in $0; do (. scripts/before_install.sh miner "$name"); done'
    done = run("bash", "-ec", accept, " ".join(miner.cli.commands), cwd=installed.root)
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_that_only_read_update_nothing(installed: Checkout) -> None:
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
        assert f"was moved from {came_from}" in err
        assert installed.run()[2] == ""  # once is enough
        site = installed.root.glob(".venv/lib/*/*/*.pth")
        assert run("grep", "-rIl", came_from, installed.root / ".venv/bin", *site).stdout == ""
    assert installed.builds() == before


@pytest.mark.parametrize("name", [*PROGRAMS])
def test_each_start_script_execs_its_program(name: str) -> None:
    script, module = PROGRAMS[name]
    lines = (PROJECT / script).read_text().splitlines()
    assert lines[-1].startswith(f'exec "$(readlink -f .venv)/bin/python" -m {module} "$@"')
    assert any(f'. scripts/before_install.sh {name} "$@"' in line for line in lines)
