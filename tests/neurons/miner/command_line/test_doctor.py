"""The doctor's checks against real files, repositories and servers."""

import sys
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from neurons.miner.command_line import commands, doctor, kernel_checks
from neurons.miner.command_line.machine_checks import failure
from neurons.miner.watcher import newer_commit
from neurons.runtime.flags import CommandLineSettings
from neurons.runtime.identity import create_throwaway, hotkey_file
from neurons.runtime.loading import Sources
from neurons.runtime.settings import Settings
from tests.harness.samples import environment
from tests.neurons.fake_validator_api import FakeValidatorApi, serve
from tests.neurons.githost import CANARY, GitHub
from tests.processes import run
from tests.repositories import commit, make_checkout, run_git
from tests.servers import Handler, Server, serving


@pytest.fixture
def settings(url: str, host: GitHub, upstream: Path, tmp_path: Path) -> Settings:
    host.login = "Ada"
    create_throwaway(tmp_path, "w", "hot")
    github = {"GITHUB_API_URL": host.url, "GITHUB_TOKEN": CANARY, "GITHUB_USERNAME": "ada"}
    wallet = {"WALLET_MINER_NAME": "w", "WALLET_HOTKEY": "hot", "WALLET_PATH": str(tmp_path)}
    fork = {"FORK_UPSTREAM_URL": str(upstream), "TARGET_SEQUENCE_LENGTH": "2048"}
    own = {"STATE_DIR": f"{tmp_path}/state", "SUBTENSOR_NETWORK": "offline", "DEVICE": "cpu"}
    environ = {"VALIDATOR_API_URL": url} | github | wallet | fork | own
    return Sources(environ=environ, env_file=Path("/dev/null")).settings("miner")


def test_a_good_machine_has_no_failure(settings: Settings) -> None:
    checks = list(doctor.examine(settings, embedded=False))
    names = [check.name for check in checks]
    expected = ["python", "torch", "triton", "gpu", "git", "disk", ".env"]
    expected += ["target", "scope", "publishing", "upstream", "fork"]
    assert names == [*expected, "wallet", "api", "clock", "token", "registration", "update"]
    assert [check for check in checks if check.level == "failure"] == []
    assert all(check.remedy for check in checks if check.level != "ok")


def test_control_characters_in_findings_are_not_printed(monkeypatch, capsys):
    finding = failure("api", "\x1b]0;owned\x07\u202e[red]text[/x]", "\x1b[2Jdo this")
    monkeypatch.setattr(kernel_checks, "examine", lambda _: [finding])
    assert commands.doctor(CommandLineSettings(), as_json=False, kernels=True) == 1
    shown = capsys.readouterr().out
    assert "[red]text[/x]" in shown
    assert "[2Jdo this" in shown
    assert shown.replace("\n", "").isprintable()


def test_bad_settings_do_not_hide_faults_of_the_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "resolve_device", lambda _: "cuda")
    monkeypatch.setattr("shutil.which", lambda _: None)
    env_file = tmp_path / ".env"
    env_file.write_text(f"NETUID=x\nSTATE_DIR={tmp_path}/state\n")
    assert (
        commands.doctor(CommandLineSettings(env_file=env_file), as_json=False, kernels=False) == 1
    )
    shown = capsys.readouterr().out
    assert "NETUID='x'" in shown
    assert "neither gcc nor clang is found" in shown
    assert f"GB free at {tmp_path}\n" in shown


NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("check", "changes", "detail", "remedy"),
    [
        (doctor.publishing, {"fork_branch": ".."}, "FORK_BRANCH='..'", "Use one like"),
        (doctor.publishing, {"repo_path": Path("/proc")}, "is not a git checkout", "REPO_PATH"),
        (doctor.target, {"target_sequence_length": 100_000}, "on a CPU", "NVIDIA GPU"),
        (doctor.token, {"github_api_url": NOWHERE}, "cannot be reached", "network"),
        (doctor.upstream, {"fork_upstream_url": f"{NOWHERE}/a.git"}, NOWHERE, "GITHUB_UPSTREAM"),
        (doctor.upstream, {"fork_upstream_url": "ext::sh -c date"}, "ext::", "GITHUB_UPSTREAM"),
        (doctor.registration, {"subtensor_network": "ws://127.0.0.1:9"}, "ws:", "mining continues"),
        (doctor.api, {"validator_api_url": NOWHERE}, NOWHERE, "network"),
    ],
)
def test_a_fault_has_one_line_and_a_remedy(settings, check, changes, detail, remedy):
    (finding,) = doctor.guarded(check, settings.model_copy(update=changes))
    assert finding.level == ("warning" if "ws:" in detail else "failure")
    assert (detail in finding.detail, len(finding.detail.splitlines())) == (True, 1)
    assert remedy in finding.remedy
    assert "GITHUB_TOKEN" not in finding.detail


@pytest.mark.parametrize(("memory_gib", "level"), [(141, "ok"), (5, "failure")])
def test_the_target_must_fit_the_gpu_that_is_measured(settings, monkeypatch, memory_gib, level):
    """CUDA may show another GPU first than NVML does."""
    card = environment(device="cuda", gpu="a card", gpu_memory_mb=memory_gib * 1024)
    monkeypatch.setattr(doctor, "describe_machine", lambda _: card)
    given = settings.model_copy(update={"device": "cuda", "target_sequence_length": 1_000_000})
    assert [one.level for one in doctor.guarded(doctor.target, given)] == [level]


def test_an_unregistered_hotkey_gets_a_command_that_names_it(settings, monkeypatch):
    monkeypatch.setattr("neurons.runtime.identity.registered_uid", lambda *_: None)
    monkeypatch.setenv("HOME", str(settings.wallet_path))
    (check,) = doctor.registration(settings.model_copy(update={"subtensor_network": "test"}))
    assert check.level == "warning"
    assert check.remedy.endswith("--network test --wallet w --wallet-hotkey hot")
    btcli, *words = check.remedy.split()
    done = run(Path(sys.executable).with_name(Path(btcli).name), *words)
    assert "no wallet named 'w'" in done.stderr  # btcli accepts the flags, and looks for this one


@pytest.fixture
def tree(tmp_path: Path, settings: Settings) -> Path:
    """The miner's own clone, with the smallest code that can be imported."""
    root = settings.state_dir / "fork"
    for name in ("fla", "fla/layers", "fla/ops", "fla/ops/quasar"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").touch()
    (root / "fla/ops/quasar/chunk.py").write_text("def chunk_quasar(): ...\n")
    (root / "fla/layers/quasar.py").write_text("class QuasarAttention: ...\n")
    return root


def test_before_the_clone_the_packages_that_it_imports_are_checked(settings, monkeypatch):
    (check,) = doctor.fork(settings)
    assert check.level == "ok"
    assert "transformers" in check.detail
    monkeypatch.setattr(doctor, "fork_imports", lambda: {"torch": [], "no_such_module.x": ["y"]})
    (check,) = doctor.fork(settings)
    assert check.level == "failure"
    assert "no_such_module, which is not installed" in check.detail
    assert "pip install no_such_module" in check.remedy


def test_the_fork_is_imported_by_a_child(settings: Settings, tree: Path) -> None:
    before = set(sys.modules)
    (check,) = doctor.fork(settings)
    assert (check.level, str(tree) in check.detail) == ("ok", True)
    assert not {"torch", "fla"} & (set(sys.modules) - before)


def test_a_checkout_that_cannot_be_imported_is_a_failure(settings, tree):
    (tree / "fla/layers/quasar.py").write_text("from no_such_module.part import thing\n")
    elsewhere = tree.rename(tree.with_name("checkout"))
    (check,) = doctor.fork(settings.model_copy(update={"repo_path": elsewhere}))
    assert check.level == "failure"
    assert "fla/layers/quasar.py needs no_such_module, which is not installed" in check.detail
    assert check.remedy.startswith("Install that module into this Python")


def test_row_31_an_env_file_that_others_can_read_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("NETUID=24\nDEBUG=3\n")
    file.chmod(0o644)
    ignored, mode = doctor.environment_file(Sources(env_file=file, environ={}).settings())
    assert ("ignored" in ignored.detail, ignored.remedy) == (True, "Remove the line from .env.")
    assert mode.remedy == f"chmod 600 {file}"


def test_row_32_a_missing_hotkey_a_coldkey_and_an_open_file_are_reported(settings, tmp_path):
    missing = settings.model_copy(update={"wallet_hotkey": "other"})
    (check,) = doctor.guarded(doctor.wallet, missing)
    assert check.level == "failure"
    assert "btcli wallet new-hotkey" in check.remedy
    assert [check.level for check in doctor.wallet(settings)] == ["ok"]
    (tmp_path / "w" / "coldkey").write_text("{}")
    hotkey_file("w", "hot", tmp_path).chmod(0o644)
    hotkey, coldkey, open_file = doctor.wallet(settings)
    assert [check.level for check in (hotkey, coldkey, open_file)] == ["ok", "warning", "warning"]
    assert "coldkey" in coldkey.detail
    assert "chmod 600" in open_file.remedy


HEALTHY = b'{"status": "ok"}'


@pytest.mark.parametrize(
    ("health", "route", "level", "part"),
    [
        ((200, HEALTHY), 405, "ok", "serves this competition"),
        ((200, HEALTHY), 404, "failure", "it does not serve this competition"),
        ((404, b"no"), 404, "failure", "it does not serve this competition"),
        ((200, b"<html>This domain is for sale</html>"), 200, "failure", "of another program"),
        ((503, HEALTHY), 503, "failure", "answers 503"),
        ((200, HEALTHY), 403, "warning", "unknown whether"),
        ((200, HEALTHY + b" " * 10**7), 405, "ok", "serves this competition"),
    ],
)
def test_a_server_of_another_program_is_not_taken_for_the_api(settings, health, route, level, part):
    class Reply(Handler):
        def serve(self) -> None:
            self.send(*health) if self.path == "/health" else self.send(route, b"")

    server = Server(Reply)
    with serving(server):
        given = settings.model_copy(update={"validator_api_url": server.url})
        finding = next(doctor.api(given))
    assert (finding.level, part in finding.detail) == (level, True), finding
    assert bool(finding.remedy) == (level != "ok")


@pytest.mark.parametrize(("offset", "level"), [(-3600, "warning"), (5, "ok")])
def test_clock(offset: float, level: str, settings: Settings, fake_api: FakeValidatorApi) -> None:
    with serve(fake_api, formatdate(time.time() + offset, usegmt=True)) as url:
        _, clock = doctor.api(settings.model_copy(update={"validator_api_url": url}))
    assert (clock.name, clock.level) == ("clock", level)


def test_a_newer_commit_of_the_branch_is_found_and_not_fetched(tmp_path: Path) -> None:
    origin = make_checkout(tmp_path / "origin", {"a": "1"})
    run_git(tmp_path, "clone", "--quiet", str(origin), "here")
    here = tmp_path / "here"
    assert newer_commit(here) is None
    newest = commit(origin, {"a": "2"})
    assert newer_commit(here) == newest
    assert newest not in run_git(here, "cat-file", "--batch-check", "--batch-all-objects")
    run_git(here, "pull", "--quiet")
    assert newer_commit(here) is None
    commit(here, {"b": "ahead of its origin"})
    assert newer_commit(here) is None


def test_no_update_is_found_without_a_checkout_or_an_origin(tmp_path: Path) -> None:
    assert newer_commit(tmp_path) is None
    checkout = make_checkout(tmp_path / "alone", {"a": "1"})
    assert newer_commit(checkout) is None
    run_git(checkout, "remote", "add", "origin", "http://127.0.0.1:9/none.git")
    assert newer_commit(checkout) is None
