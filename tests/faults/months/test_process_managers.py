"""The miner under pm2, in screen and as a systemd service; absent programs skip their tests."""

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from neurons.runtime.heartbeat import notify
from neurons.runtime.process import GRACE_SECONDS
from tests import PROJECT
from tests.neurons.miner.miner_command import idle_environment
from tests.processes import HANG, is_alive, run, wait_for

PM2 = shutil.which("pm2") or shutil.which("pm2", path=PROJECT / ".ci/tools/node_modules/.bin")
START = PROJECT / "START_MINER.sh"
UNITS = sorted((PROJECT / "scripts/systemd").glob("*.service"))
WAITING = "waiting for a new round"

needs_installation = pytest.mark.skipif(
    not (PROJECT / ".venv/quasar-install").exists(), reason="the start scripts would install first"
)


@pytest.fixture
def miner(tmp_path: Path) -> dict[str, str]:
    """The environment of a miner whose API is down, so that it soon waits."""
    managers = {"PM2_HOME": str(tmp_path / "pm2"), "SCREENDIR": str(tmp_path / "screens")}
    return idle_environment(tmp_path) | managers | {"TERM": "xterm"}


def log_of(miner: dict[str, str]) -> str:
    file = Path(miner["STATE_DIR"], "logs/miner.log")
    return file.read_text() if file.exists() else ""


def lock_holder(miner: dict[str, str]) -> int:
    """Return the pid in the miner's lock; 0 before a miner has written it."""
    return int(Path(miner["STATE_DIR"], "lock").read_text() or 0)


@pytest.fixture
def pm2(miner: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """A function that runs pm2, with its own daemon, and returns pm2's data of the miner."""

    def call(*words: str, **changes: str) -> Any:
        env = miner | changes
        done = run(PM2, *words, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        listed = run(PM2, "jlist", env=env).stdout
        (app,) = json.loads(listed[listed.index("[{") :])
        return app

    yield call
    run(PM2, "kill", env=miner)


@needs_installation
@pytest.mark.skipif(PM2 is None, reason="needs pm2: .ci/run installs it")
def test_row_15_pm2_starts_stops_and_restarts_the_miner(miner, pm2):
    config = str(PROJECT / "scripts/ecosystem.config.js")
    app = pm2("start", config, "--only", "quasar-miner")
    wait_for(lambda: WAITING in log_of(miner))
    first = lock_holder(miner)
    assert first == app["pid"]  # pm2's signals reach Python itself
    out, err = (
        Path(app["pm2_env"][name]).read_text() for name in ("pm_out_log_path", "pm_err_log_path")
    )
    assert ("miner starts" in out, "miner starts" in err) == (True, False)
    assert "paused" in err

    os.kill(first, signal.SIGKILL)
    wait_for(lambda: lock_holder(miner) not in {0, first})
    wait_for(lambda: log_of(miner).count(WAITING) == 2)
    second = lock_holder(miner)

    stopped = pm2("stop", "quasar-miner")
    assert (stopped["pm2_env"]["status"], is_alive(second)) == ("stopped", False)
    assert "info     stopped" in log_of(miner)
    assert stopped["pm2_env"].get("exit_code") == 0

    pm2("restart", "quasar-miner", "--update-env", NETUID="none")
    wait_for(lambda: "NETUID='none'" in log_of(miner))
    wait_for(lambda: pm2("ping")["pm2_env"]["status"] == "stopped")  # 78: not started again
    assert log_of(miner).count("NETUID='none'") == 1


@needs_installation
@pytest.mark.skipif(shutil.which("screen") is None, reason="needs screen: .ci/run installs it")
def test_row_15_closing_a_screen_session_stops_the_miner(miner, tmp_path):
    (tmp_path / "screens").mkdir(mode=0o700)
    run("screen", "-dmS", "quasar", START, env=miner, check=True)
    wait_for(lambda: WAITING in log_of(miner))
    pid = lock_holder(miner)
    assert is_alive(pid)
    run("screen", "-S", "quasar", "-X", "quit", env=miner, check=True)
    wait_for(lambda: not is_alive(pid))
    assert "info     stopped" in log_of(miner)


# ---- systemd ----------------------------------------------------------------------------------


def test_systemd_is_notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(HANG)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1", "STATUS=mining")
        assert systemd.recv(100) == b"READY=1\nSTATUS=mining"
    notify("STOPPING=1")  # without a listener: no error
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", ["checkout", "a checkout"])
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_each_unit(unit: Path, name: str, tmp_path: Path) -> None:
    checkout = tmp_path / name
    checkout.mkdir()
    for script in PROJECT.glob("START_*.sh"):
        shutil.copy(script, checkout)
    (tmp_path / unit.name).write_text(filled_in(unit, checkout))
    done = run("systemd-analyze", "verify", tmp_path / unit.name)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_documented_command_completes_each_unit(unit: Path) -> None:
    text = filled_in(unit)
    assert not re.findall("@[A-Z]+@", text)
    home, user = os.environ["HOME"], run("id", "-un").stdout.strip()
    caches = f'ReadWritePaths="-{home}/.cache" "-{home}/.triton" "-{home}/.nv"'
    assert {caches, f'ReadWritePaths="{PROJECT}"', f"User={user}"} <= set(text.splitlines())


def filled_in(unit: Path, checkout: Path = PROJECT) -> str:
    """Return a unit as completed in `checkout` by the command of docs/operating.md."""
    document = (PROJECT / "docs/operating.md").read_text()
    (command,) = re.findall(r"^ *(sed .*) scripts/systemd/quasar-miner.service \|$", document, re.M)
    return run("bash", "-c", f"{command} {unit}", cwd=checkout, check=True).stdout


def ecosystem(root: Path) -> Any:
    script = "console.log(JSON.stringify(require(process.argv[1]).apps))"
    config = root / "scripts/ecosystem.config.js"
    return json.loads(run("node", "-e", script, config, check=True).stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js, which pm2 runs on")
def test_pm2_runs_a_miner_for_each_settings_file(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(PROJECT / "scripts/ecosystem.config.js", tmp_path / "scripts")
    for name in (".env", ".env.0", ".env.3", ".env.example"):
        (tmp_path / name).touch()
    apps = ecosystem(tmp_path)
    named = {app["env"].get("ENV_FILE") for app in apps if "quasar-miner-" not in app["name"]}
    assert named == {str(tmp_path / ".env")}, "the loss of .env would start a trial"
    miners = {app["name"]: app for app in apps if "quasar-miner-" in app["name"]}
    assert [*miners] == ["quasar-miner-0", "quasar-miner-3"]
    unit = (PROJECT / "scripts/systemd/quasar-miner@.service").read_text()
    for number in ("0", "3"):
        app = miners[f"quasar-miner-{number}"]
        assert (app["env"], app["stop_exit_codes"]) == ({"CUDA_VISIBLE_DEVICES": number}, [78])
        assert app["kill_timeout"] > 1000 * GRACE_SECONDS
        flags = " ".join(app["args"])
        assert flags == f"--env-file .env.{number} --state-dir state-{number}"
        started_by = unit.replace("%i", number)
        assert f'START_MINER.sh" {flags}\n' in started_by
        assert f"CUDA_VISIBLE_DEVICES={number}\n" in started_by
