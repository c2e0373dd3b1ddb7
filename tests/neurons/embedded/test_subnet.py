"""The embedded subnet: its selection, its settings, and the supervision of its processes."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from neurons.embedded import settings as settings_module
from neurons.embedded import subnet as embedded
from neurons.embedded.competition import Competition
from neurons.embedded.participants import submit_cheat
from neurons.embedded.settings import embedded_settings, is_embedded
from neurons.embedded.subnet import EmbeddedSubnet
from neurons.runtime import child as child_module
from neurons.runtime.child import Child
from neurons.runtime.errors import ConfigError, QuasarError
from neurons.runtime.process import Stopped
from neurons.runtime.settings import Settings
from tests.processes import HANG, is_alive, wait_for

NOWHERE = Path(os.devnull)


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ({}, {}, True),
        ({"netuid": "3"}, {"GITHUB_TOKEN": "ghp_x", "LOG_FORMAT": "json"}, True),
        ({}, {"VALIDATOR_API_URL": "https://example.org"}, False),
        ({"repo_path": "/srv/fork"}, {}, False),
    ],
)
def test_a_run_is_embedded_only_if_no_setting_selects_a_subnet(flags, environ, expected, tmp_path):
    assert is_embedded(flags, NOWHERE, environ) is expected
    present = tmp_path / ".env"
    present.touch()
    assert not is_embedded(flags, present, environ)


def test_the_users_settings_apply_except_those_beyond_this_machine(tmp_path, monkeypatch):
    environ = {"GITHUB_TOKEN": "ghp_canary", "SUBTENSOR_NETWORK": "finney", "CLAIM_RUNS": "5"}
    flags = {"state_dir": tmp_path, "target_sequence_length": "512", "device": "cpu"}
    settings = embedded_settings(flags, environ)
    assert settings.github_token is None
    assert settings.subtensor_network == "offline"
    assert settings.state_dir == tmp_path / "embedded"
    assert settings.wallet_path.is_relative_to(settings.state_dir)
    assert (settings.claim_runs, settings.target_sequence_length) == (5, 512)
    assert settings.claim_headroom == 0.5
    monkeypatch.setattr(settings_module, "resolve_device", lambda device: "cuda")
    on_gpu = embedded_settings({"state_dir": tmp_path}, {})
    assert (on_gpu.device, on_gpu.target_sequence_length) == ("cuda", "auto")
    assert on_gpu.claim_headroom == 0.0


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(child_module, "RESTART_SECONDS", (0.05, 0.1))
    monkeypatch.setenv("GITHUB_TOKEN", "ghp_canary")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return embedded_settings({"state_dir": tmp_path, "device": "cpu"}, os.environ)


@pytest.fixture
def subnet(settings: Settings) -> Iterator[EmbeddedSubnet]:
    with EmbeddedSubnet(settings, threading.Event()) as running:
        yield running


def pid_of(subnet: EmbeddedSubnet, index: int) -> int | None:
    process = subnet._children[index].process
    return process.pid if process is not None and process.poll() is None else None


def health(subnet: EmbeddedSubnet) -> bool:
    url = f"{subnet.settings.validator_api_url}/health"
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=HANG).is_success
    return False


def test_a_killed_child_is_restarted_at_the_same_address(subnet: EmbeddedSubnet) -> None:
    assert health(subnet)
    wait_for(lambda: pid_of(subnet, 1))
    for index in (0, 1):
        old = pid_of(subnet, index)
        assert old is not None
        environ = Path(f"/proc/{old}/environ").read_bytes()
        assert b"canary" not in environ
        os.kill(old, signal.SIGKILL)
        wait_for(lambda: pid_of(subnet, index) not in (None, old))  # noqa: B023
    wait_for(lambda: health(subnet))


def test_the_next_run_uses_the_same_hotkey_port_and_remote(settings: Settings) -> None:
    with EmbeddedSubnet(settings, threading.Event()) as first:
        wait_for(lambda: pid_of(first, 1))
        pids = [pid_of(first, index) for index in (0, 1)]
    assert not any(is_alive(pid) for pid in pids if pid)
    second = EmbeddedSubnet(settings, threading.Event())
    assert second.identity.hotkey == first.identity.hotkey
    assert second.settings == first.settings
    database = settings.state_dir / "validator_api.db"
    assert sqlite3.connect(database).execute("PRAGMA quick_check").fetchone() == ("ok",)


def test_a_stop_ends_the_wait_for_the_api(settings: Settings) -> None:
    stop = threading.Event()
    stop.set()
    subnet = EmbeddedSubnet(settings, stop)
    with pytest.raises(Stopped), subnet:
        pass
    assert not subnet._thread.is_alive()


def test_an_api_that_cannot_start_names_its_log(settings: Settings) -> None:
    (settings.state_dir / "validator_api.db").mkdir(parents=True)
    with pytest.raises(QuasarError, match=r"validator API of this run ended.*api\.log"):
        EmbeddedSubnet(settings, threading.Event()).__enter__()


def log_line(subnet: EmbeddedSubnet, **entry: object) -> None:
    with subnet._tail.file.open("a") as file:
        file.write(json.dumps({"level": "warning", **entry}) + "\n")


def test_a_validator_with_a_configuration_error_ends_the_run(settings: Settings) -> None:
    stop = threading.Event()
    strict = settings.model_copy(update={"sandbox": "required"})
    with EmbeddedSubnet(strict, stop) as running:
        running._children[1].environment["PATH"] = "/nonexistent"
        assert stop.wait(HANG), running._tail.file.read_text()
        with pytest.raises(ConfigError, match=r"validator of this run ended.*bubblewrap is not"):
            running.check()


def test_a_submission_that_is_postponed_three_times_ends_the_run(subnet):
    stop = subnet._stop
    for reason in ("a", "b"):
        log_line(subnet, event="postponed", submission=1, reason=reason)
    log_line(subnet, event="postponed", submission=2, reason="c")
    wait_for(lambda: subnet._postponed[2])
    assert not stop.is_set()
    subnet.check()
    log_line(subnet, event="postponed", submission=1, reason="No module named pydantic")
    assert stop.wait(HANG), subnet._tail.file.read_text()
    with pytest.raises(QuasarError, match="submission 1 3 times: No module named pydantic"):
        subnet.check()


def test_the_real_validators_postponement_is_recognised(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "POSTPONED_ALLOWED", 1)
    monkeypatch.setenv("TARGET_SEQUENCE_LENGTH", "512")
    stop = threading.Event()
    without_gpu = EmbeddedSubnet(settings, stop)
    without_gpu._children[1].environment.update(DEVICE="cuda", SANDBOX="off")
    with without_gpu as running:
        competition = Competition(tmp_path / "c", 1, inference=False, cheat=True, stop=stop)
        assert competition.cheat is not None
        url, fork = str(running.settings.validator_api_url), tmp_path / "cheat.git"
        submit_cheat(competition.settings, url, competition.cheat, fork)
        assert stop.wait(HANG), running._tail.file.read_text()
        with pytest.raises(QuasarError, match=r"postponed.*control run failed.*CUDA"):
            running.check()


def test_row_16_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import os, time; from pathlib import Path; from neurons.runtime.child import Child\n"
        "env = dict(os.environ, PYTHONUNBUFFERED='1')\n"
        f"child = Child('c', ['http.server', '0'], env, Path('{tmp_path}/log'))\n"
        "child.watch(); print(child.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(lambda: "Serving" in (tmp_path / "log").read_text() or not is_alive(pid))
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(pid))


def test_a_long_log_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "LOG_BYTES", 100)
    child = Child("c", ["http.server", "0"], dict(os.environ), tmp_path / "log")
    child.watch()
    try:
        child.log_file.write_text("x" * 200)
        child.watch()
        assert child.log_file.stat().st_size < 100
    finally:
        child.terminate()
        child.stop()
