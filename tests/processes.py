"""Processes of a test's own: commands that run to their end, and waiting for what they do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests import PROJECT

HANG = 600.0
"""Seconds after which a test takes what it waits for to hang.

Far more than anything takes, so that a busy or slow machine fails no test: nothing may assert that
something is done within a shorter time. pytest's own limit (pyproject.toml) is three times as long.
"""


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder and return its end and its output.

    Args:
        options: what `subprocess.run` takes besides, such as `env`, or `check` to raise on failure.
    """
    defaults = {"cwd": PROJECT, "check": False, "timeout": HANG}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, **{**defaults, **options})


run_python = partial(run, sys.executable)


HELPS = """\
import contextlib, io, json, runpy, sys, warnings

warnings.simplefilter("ignore", RuntimeWarning)  # runpy's, of a module that another one imported
helps = []
for words in json.load(sys.stdin):
    run = runpy.run_module if words[0] == "-m" else runpy.run_path
    sys.argv = [*words[words[0] == "-m" :], "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            run(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, (words, end.code)
    helps.append(shown.getvalue())
json.dump(helps, sys.stdout)
"""


def helps_of(lines: Iterable[Sequence[str]], **options: Any) -> list[str]:
    """Return the output of each command with `--help`.

    One process runs them all, as each would import the same modules again.

    Args:
        lines: the commands without the interpreter: `-m` and a module, or a file, and arguments.
        options: as of `run`.
    """
    done = run_python("-c", HELPS, input=json.dumps([*lines]), **options)
    assert (done.returncode, done.stderr) == (0, "")
    helps: list[str] = json.loads(done.stdout)
    return helps


@contextmanager
def started(*words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run Python beside the test, and kill it where the block is left."""
    command = [sys.executable, *words]
    process = subprocess.Popen(command, cwd=PROJECT, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], object], child: subprocess.Popen[str] | None = None) -> None:
    """Wait until a condition holds; fail after HANG, or as soon as `child` has ended."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert child is None or child.poll() is None, child.communicate()
        assert time.monotonic() < deadline, f"not within {HANG} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[str]:
    """Return the command lines of the direct children of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == pid:
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
