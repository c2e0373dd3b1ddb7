"""local_validator: a real clone of a real repository, judged before anything is sent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import local_validator
import pytest


def git(folder: Path, *command: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    run = ["git", "-C", str(folder), *who, *command]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A fork whose branch `quasar` holds none of the operator's files."""
    root = tmp_path / "my fork"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=quasar")
    (root / "README.md").write_text("nothing\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "Start")
    return root


def test_the_branch_tip_is_what_is_judged(fork: Path) -> None:
    address = local_validator.fork_address(str(fork))
    assert local_validator.newest_commit(address, "quasar") == git(fork, "rev-parse", "HEAD")
    with pytest.raises(SystemExit, match="--branch names another"):
        local_validator.newest_commit(address, "no-such-branch")


def test_a_fork_that_breaks_the_rules_is_rejected(
    fork: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["local_validator.py", str(fork), "--claim", "1000"])
    assert local_validator.main() == 1
    said = capsys.readouterr().out
    assert "REJECTED: The fork breaks the rules" in said
    assert "fla/ops/quasar/chunk.py" in said
