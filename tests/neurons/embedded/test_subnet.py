"""The embedded subnet: its selection, its settings, and the supervision of its processes."""

import json
import os
import signal
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from neurons.embedded import settings as settings_module
from neurons.embedded.settings import embedded_settings, is_embedded
from neurons.embedded.subnet import EmbeddedSubnet
from neurons.runtime import child as child_module
from neurons.runtime.child import Child
from neurons.runtime.errors import ConfigError, Postponed, QuasarError
from neurons.runtime.loading import Sources
from neurons.runtime.process import Stopped
from neurons.runtime.settings import Settings
from neurons.validator.loop import Validator
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
def test_a_run_is_embedded_if_no_setting_names_a_real_subnet(flags, environ, expected, tmp_path):
    assert is_embedded(Sources(flags, NOWHERE, environ)) is expected
    present = tmp_path / ".env"
    present.touch()
    assert not is_embedded(Sources(flags, present, environ))


def test_user_settings_apply_unless_they_reach_other_machines(tmp_path, monkeypatch):
    environ = {"GITHUB_TOKEN": "ghp_canary", "SUBTENSOR_NETWORK": "finney", "CLAIM_RUNS": "5"}
    flags = {"state_dir": tmp_path, "target_sequence_length": "512", "device": "cpu"}
    settings = embedded_settings(flags, environ)
    assert (settings.github_token, settings.subtensor_network) == (None, "offline")
    assert settings.state_dir == tmp_path / "embedded"
    assert settings.wallet_path.is_relative_to(settings.state_dir)
    claim = (settings.claim_runs, settings.target_sequence_length, settings.claim_headroom)
    assert claim == (5, 512, 0.5)
    monkeypatch.setattr(settings_module, "resolve_device", lambda device: "cuda")
    gpu = embedded_settings({"state_dir": tmp_path}, {})
    assert (gpu.device, gpu.target_sequence_length, gpu.claim_headroom) == ("cuda", "auto", 0.0)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(child_module, "RESTART_SECONDS", (0.05, 0.1))
    monkeypatch.setenv("GITHUB_TOKEN", "ghp_canary")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return embedded_settings({"state_dir": tmp_path, "device": "cpu"}, os.environ)


def pid_of(subnet: EmbeddedSubnet, index: int) -> int | None:
    process = subnet._children[index].process
    return process.pid if process is not None and process.poll() is None else None


def health(subnet: EmbeddedSubnet) -> bool:
    url = f"{subnet.settings.validator_api_url}/health"
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=HANG).is_success
    return False


def test_killed_children_restart_and_the_next_run_has_the_same_hotkey_port_and_remote(settings):
    with EmbeddedSubnet(settings, threading.Event()) as first:
        assert health(first)
        wait_for(lambda: pid_of(first, 1))
        for index in (0, 1):
            old = pid_of(first, index)
            assert old is not None
            assert b"canary" not in Path(f"/proc/{old}/environ").read_bytes()
            os.kill(old, signal.SIGKILL)
            wait_for(lambda: pid_of(first, index) not in (None, old))  # noqa: B023
        wait_for(lambda: health(first))
        pids = [pid_of(first, index) for index in (0, 1)]
    assert not any(is_alive(pid) for pid in pids if pid)
    second = EmbeddedSubnet(settings, threading.Event())
    assert (second.identity.hotkey, second.settings) == (first.identity.hotkey, first.settings)
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


def test_a_validator_with_a_configuration_error_ends_the_run(settings: Settings) -> None:
    stop = threading.Event()
    subnet = EmbeddedSubnet(settings.model_copy(update={"sandbox": "required"}), stop)
    validator = subnet._children.pop()
    validator.environment["PATH"] = "/nonexistent"
    validator.due = 0.0
    subnet._children = [validator]  # it fails before it needs the API
    subnet._thread.start()
    assert stop.wait(HANG), subnet._tail.file.read_text()
    with pytest.raises(ConfigError, match=r"validator of this run ended.*bubblewrap is not"):
        subnet.check()
    subnet.__exit__()


def postpone(subnet: EmbeddedSubnet, submission: int, reason: str) -> None:
    """Log a submission without a verdict as the real validator does, and let the subnet read it."""

    def work() -> None:
        raise Postponed(reason) if reason else ZeroDivisionError

    loop: Any = SimpleNamespace(_attempts=SimpleNamespace(postpone=lambda *_: 60.0))
    row: Any = SimpleNamespace(id=submission)
    with capture_logs() as lines:
        Validator._settle(loop, row, work)
    with subnet._tail.file.open("a") as file:
        file.writelines(json.dumps({"level": "warning", **line}) + "\n" for line in lines)
    subnet._look_for_failures()


def test_a_submission_that_is_postponed_three_times_ends_the_run(settings: Settings) -> None:
    stop = threading.Event()
    subnet = EmbeddedSubnet(settings, stop)
    for submission, reason in ((1, "a"), (1, ""), (2, "c")):
        postpone(subnet, submission, reason)
    assert not stop.is_set()
    subnet.check()
    postpone(subnet, 1, "No module named pydantic")
    assert stop.is_set()
    with pytest.raises(QuasarError, match="submission 1 3 times: No module named pydantic"):
        subnet.check()


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
