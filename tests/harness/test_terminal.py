"""Stopped commands end without a traceback, and leave no workers and no folders."""

import os
import signal
import subprocess

import pytest

from tests.processes import is_alive, started, wait_for

HANGS = """
import os, pathlib, time
if not pathlib.Path({note!r}).exists():
    pathlib.Path({note!r}).write_text(str(os.getpid()))
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["-m", "harness", "--runs", "1", "--lengths", "16", "--tree"], signal.SIGTERM),
        pytest.param(
            ["-m", "harness", "compare", "--lengths", "16", "{tree}"],
            signal.SIGINT,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_stopped_command_ends_quietly(make_tree, tmp_path, words, number):
    note, folders = tmp_path / "pid", tmp_path / "folders"
    folders.mkdir()
    tree = str(make_tree(HANGS.format(note=str(note))))
    command = [word.format(tree=tree) for word in words] + [tree, "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "TMPDIR": str(folders)}
    with started(*command, env=environment, **pipes) as process:
        wait_for(lambda: note.exists() and note.read_text(), child=process)
        process.send_signal(number)
        output, errors = process.communicate()
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == "stopped"
    assert "Traceback" not in output + errors
    wait_for(lambda: not is_alive(int(note.read_text())))
    assert not list(folders.glob("worker-*")) + list(folders.glob("tree-*"))
