"""The hooks of `make hooks`, run by pre-commit itself."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests import PROJECT
from tests.processes import run


@pytest.mark.parametrize(("length", "refused"), [(72, False), (73, True)])
def test_a_subject_past_72_characters_is_refused(
    tmp_path: Path, length: int, refused: bool
) -> None:
    shutil.copy(PROJECT / ".pre-commit-config.yaml", tmp_path)
    message = tmp_path / "message"
    message.write_text("x" * length + "\n\n" + "y" * 100 + "\n")
    env = os.environ | {"PRE_COMMIT_HOME": str(tmp_path / "cache")}
    hook = [sys.executable, "-m", "pre_commit", "run", "--hook-stage"]
    for command in (
        ["git", "init", "--quiet"],
        ["git", "add", ".pre-commit-config.yaml"],
        [*hook, "commit-msg", "--commit-msg-filename", str(message)],
    ):
        done = run(*command, cwd=tmp_path, env=env)
    assert ("x" * length in done.stdout) == refused
    assert done.returncode == refused, done.stdout + done.stderr
