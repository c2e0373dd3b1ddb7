"""The doctor's checks against real files, repositories and servers."""

from __future__ import annotations

import sys
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from harness.imports import install_command
from neurons.miner.command_line import commands, doctor, kernel_checks, machine_checks
from neurons.miner.command_line.machine_checks import failure
from neurons.miner.command_line.update import newer_commit
from neurons.runtime.flags import Given
from neurons.runtime.identity import create_throwaway, hotkey_file
from neurons.runtime.loading import load_settings
from neurons.runtime.settings import Settings
from tests import PROJECT
from tests.neurons.fake_validator_api import FakeValidatorApi, Fault, serve
from tests.neurons.githost import CANARY, GitHub
from tests.repositories import commit, make_checkout, run_git


@pytest.fixture
def settings(url: str, host: GitHub, upstream: Path, tmp_path: Path) -> Settings:
    host.login = "Ada"
    create_throwaway(tmp_path, "w", "hot")
    environ = {
        "VALIDATOR_API_URL": url,
        "GITHUB_API_URL": host.url,
        "GITHUB_TOKEN": CANARY,
        "GITHUB_USERNAME": "ada",
        "FORK_UPSTREAM_URL": str(upstream),
        "TARGET_SEQUENCE_LENGTH": "2048",
        "WALLET_MINER_NAME": "w",
        "WALLET_HOTKEY": "hot",
        "WALLET_PATH": str(tmp_path),
        "STATE_DIR": str(tmp_path / "state"),
        "SUBTENSOR_NETWORK": "offline",
        "DEVICE": "cpu",
    }
    return load_settings(environ=environ, env_file=Path("/dev/null"), process="miner")


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
    assert commands.doctor(Given(), as_json=False, kernels=True) == 1
    shown = capsys.readouterr().out
    assert "[red]text[/x]" in shown
    assert "[2Jdo this" in shown
    assert shown.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("scope", "embedded", "level", "word"),
    [
        ("layer", False, "ok", "layer"),
        ("ops", False, "ok", "alone"),
        ("ops", True, "failure", "no layer"),
    ],
)
def test_the_scope_names_the_published_kernels(settings, scope, embedded, level, word):
    check = doctor.scope(settings.model_copy(update={"fork_scope": scope}), embedded=embedded)
    assert check.level == level
    assert word in check.detail


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"fork_branch": ".."}, "FORK_BRANCH='..'"),
        ({"repo_path": Path("/proc")}, "/proc is not a git checkout"),
    ],
)
def test_settings_that_prevent_publishing_are_failures(settings, changes, word):
    check = doctor.publishing(settings.model_copy(update=changes))
    assert check.level == "failure"
    assert word in check.detail
    assert check.remedy


@pytest.fixture
def no_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no child that imports torch."""
    monkeypatch.setattr(machine_checks, "software", lambda device: iter(()))


@pytest.mark.usefixtures("no_software")
def test_the_program_of_the_tune_command_must_exist(settings: Settings) -> None:
    def check(command: str) -> tuple[str, str]:
        checks = machine_checks.machine(settings.model_copy(update={"tune_command": command}))
        (finding,) = (one for one in checks if one.name == "optimiser")
        return finding.level, finding.detail

    missing = "TUNE_COMMAND: there is no program no-such-optimiser"
    assert check("no-such-optimiser --fast") == ("failure", missing)
    # paths are relative to the checkout
    assert check("START_MINER.sh --version") == ("ok", str(PROJECT / "START_MINER.sh"))


@pytest.mark.usefixtures("no_software")
def test_metrics_without_their_library_are_a_failure(settings, monkeypatch):
    settings = settings.model_copy(update={"metrics_port": 9464})
    assert all(one.name != "metrics" for one in machine_checks.machine(settings))
    monkeypatch.setattr(machine_checks, "find_spec", lambda name: None)
    (finding,) = (one for one in machine_checks.machine(settings) if one.name == "metrics")
    assert (finding.level, "METRICS_PORT=9464" in finding.detail) == ("failure", True)


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
    check = doctor.fork(settings)
    assert check.level == "ok"
    assert "transformers" in check.detail
    monkeypatch.setattr(doctor, "fork_imports", lambda: {"torch": [], "no_such_module.x": ["y"]})
    check = doctor.fork(settings)
    assert check.level == "failure"
    assert "no_such_module, which is not installed" in check.detail
    assert "pip install no_such_module" in check.remedy


def test_the_fork_is_imported_by_a_child(settings: Settings, tree: Path) -> None:
    before = set(sys.modules)
    check = doctor.fork(settings)
    assert (check.level, str(tree) in check.detail) == ("ok", True)
    assert not {"torch", "fla"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    ("code", "needs", "remedy"),
    [
        (
            "from no_such_module.part import thing\n",
            "no_such_module, which is not installed",
            "Install that module into this Python, if you trust it, or remove the import.",
        ),
        ("import einops.no_such_part\n", "another einops", f"Run {install_command('einops')}."),
    ],
)
def test_a_module_that_the_fork_lacks_is_named(settings, tree, code, needs, remedy):
    """An unknown module's package may have another name, so its remedy has no command."""
    (tree / "fla/layers/quasar.py").write_text(code)
    elsewhere = tree.rename(tree.with_name("checkout"))
    check = doctor.fork(settings.model_copy(update={"repo_path": elsewhere}))
    assert check.level == "failure"
    assert f"fla/layers/quasar.py needs {needs}" in check.detail
    assert check.remedy == remedy


def test_a_fork_with_a_syntax_error_is_a_failure(settings: Settings, tree: Path) -> None:
    (tree / "fla/layers/quasar.py").write_text("class QuasarAttention\n")
    check = doctor.fork(settings)
    assert check.level == "failure"
    assert "SyntaxError" in check.detail
    assert "python -m harness" in check.remedy


def test_row_31_an_env_file_that_others_can_read_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("NETUID=24\nDEBUG=3\n")
    file.chmod(0o644)
    ignored, mode = doctor.environment_file(load_settings(env_file=file, environ={}))
    assert ("ignored" in ignored.detail, ignored.remedy) == (True, "Remove the line from .env.")
    assert mode.remedy == f"chmod 600 {file}"


def test_row_32_a_missing_hotkey_a_coldkey_and_an_open_file_are_reported(settings, tmp_path):
    missing = settings.model_copy(update={"wallet_hotkey": "other"})
    (check,) = doctor.wallet(missing)
    assert check.level == "failure"
    assert "btcli wallet new-hotkey" in check.remedy
    assert [check.level for check in doctor.wallet(settings)] == ["ok"]
    (tmp_path / "w" / "coldkey").write_text("{}")
    hotkey_file("w", "hot", tmp_path).chmod(0o644)
    hotkey, coldkey, open_file = doctor.wallet(settings)
    assert [check.level for check in (hotkey, coldkey, open_file)] == ["ok", "warning", "warning"]
    assert "coldkey" in coldkey.detail
    assert "chmod 600" in open_file.remedy


def test_an_api_out_of_reach(settings: Settings, fake_api: FakeValidatorApi) -> None:
    (check,) = doctor.api(settings.model_copy(update={"validator_api_url": "http://127.0.0.1:9"}))
    assert check.level == "failure"
    assert "VALIDATOR_API_URL" in check.remedy
    fake_api.faults["/health"].append(Fault(502))
    (check,) = doctor.api(settings)
    assert "answers 502" in check.detail


@pytest.mark.parametrize(("offset", "level"), [(-3600, "warning"), (5, "ok")])
def test_clock(offset: float, level: str, settings: Settings, fake_api: FakeValidatorApi) -> None:
    with serve(fake_api, formatdate(time.time() + offset, usegmt=True)) as url:
        _, clock = doctor.api(settings.model_copy(update={"validator_api_url": url}))
    assert (clock.name, clock.level) == ("clock", level)


@pytest.mark.parametrize(
    ("scopes", "level"), [("gist, public_repo", "ok"), ("gist", "failure"), (None, "ok")]
)
def test_token_scope(scopes: str | None, level: str, settings: Settings, host: GitHub) -> None:
    host.scopes = scopes
    check = doctor.token(settings)
    assert check.level == level
    assert [headers["Authorization"] for _, headers in host.seen] == [f"Bearer {CANARY}"]
    assert CANARY not in check.detail + check.remedy


def test_a_github_out_of_reach_is_a_failure(settings: Settings) -> None:
    check = doctor.token(settings.model_copy(update={"github_api_url": "http://127.0.0.1:9"}))
    assert check.level == "failure"
    assert "does not answer" in check.detail


def test_a_chain_out_of_reach_is_a_warning_of_one_line(settings: Settings) -> None:
    check = doctor.registration(
        settings.model_copy(update={"subtensor_network": "ws://127.0.0.1:9"})
    )
    assert (check.name, check.level) == ("registration", "warning")
    assert "ws://127.0.0.1:9" in check.detail
    assert len(check.detail.splitlines()) == 1
    assert "SUBTENSOR_NETWORK" in check.remedy


def test_a_target_that_cannot_be_measured_here_is_a_failure(settings: Settings) -> None:
    check = doctor.target(settings.model_copy(update={"target_sequence_length": 100_000}))
    assert check.level == "failure"
    assert "TARGET_SEQUENCE_LENGTH=100000 cannot be measured on a CPU" in check.detail
    gpu = {"target_sequence_length": 100_000, "device": "cuda"}
    assert doctor.target(settings.model_copy(update=gpu)).level == "ok"


def test_an_upstream_that_is_not_there_is_a_failure(settings: Settings, tmp_path: Path) -> None:
    for address in ("http://127.0.0.1:9/none.git", f"{tmp_path}/none.git", "ext::sh -c date"):
        check = doctor.upstream(settings.model_copy(update={"fork_upstream_url": address}))
        assert check.level == "failure", check
        assert "FORK_UPSTREAM_URL" in check.remedy
        assert "GITHUB_TOKEN" not in check.detail  # reading the upstream needs no token


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
