"""Completion in real interactive shells, in another folder than the checkout."""

import os
import pty
import re
import select
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests import PROJECT
from tests.processes import HANG, run

SCRIPT = PROJECT / "START_MINER.sh"
RC_FILES = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/config.fish"}

pytestmark = pytest.mark.skipif(
    not os.access(PROJECT / ".venv/bin/python", os.X_OK), reason="START_MINER.sh needs .venv"
)


def documented(shell: str) -> str:
    """Return the command of docs/operating.md that installs the completion of a shell."""
    text = (PROJECT / "docs/operating.md").read_text()
    (line,) = re.findall(rf"^ +(\./START_MINER\.sh completion {shell} >>\S+)", text, re.M)
    return str(line)


def complete(shell: str, home: Path, *, until: str, keys: str) -> str:
    """Type keys and Tab into an interactive shell in `home`; return its output up to `until`."""
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "ready> "}
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(home)
        os.execvpe(shell, [shell, "-i"], env)  # noqa: S606
    shown, sent, deadline = "", False, time.monotonic() + HANG
    try:
        while until not in shown.partition(keys)[2] and time.monotonic() < deadline:
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
            elif shown and not sent:  # the prompt is shown
                os.write(terminal, f"{keys}\t".encode())
                sent = True
    except OSError as error:  # the shell has ended
        shown += f" ({error})"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("shell", RC_FILES)
def test_the_documented_line_completes_in_another_folder(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / RC_FILES[shell]).parent.mkdir(parents=True, exist_ok=True)
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    run("bash", "-c", documented(shell), env=env, check=True)
    shown = complete(shell, tmp_path, keys=f"{SCRIPT} comple", until="tion")
    assert re.search(r"comple.*?tion", shown, re.DOTALL), shown
    assert "not found" not in shown


def test_completion_prints_nothing_to_stdout_before_the_installation(tmp_path: Path) -> None:
    names = ("START_MINER.sh", "scripts/before_install.sh", "scripts/help/miner.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, tmp_path / name)
    done = run(tmp_path / "START_MINER.sh", "completion", "bash")
    assert (done.returncode, done.stdout) == (78, "")
    assert "nothing is installed" in done.stderr
