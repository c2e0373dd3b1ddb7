"""Processes that tests start, and waiting for conditions."""

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
"""Timeout of waits, in seconds.

It is far longer than any operation takes, so that tests do not fail on busy or slow machines. Tests
must not assert shorter times. pytest's timeout (pyproject.toml) is three times as long.
"""


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder and return its exit status and output.

    Args:
        options: other arguments of `subprocess.run`, such as `env` or `check`.
    """
    defaults = {"cwd": PROJECT, "check": False, "timeout": HANG}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, **{**defaults, **options})


run_python = partial(run, sys.executable)


HELPS = """\
import contextlib, io, json, logging, runpy, sys, warnings

logging.disable(logging.INFO)  # a command configures logs, and imports of the next one would log
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
    """Return the output of each command with `--help`; one process runs them all.

    Args:
        lines: the commands without the interpreter: `-m` and a module, or a file, and arguments.
        options: as for `run`.
    """
    done = run_python("-c", HELPS, input=json.dumps([*lines]), **options)
    assert (done.returncode, done.stderr) == (0, "")
    helps: list[str] = json.loads(done.stdout)
    return helps


def put_program(path: Path, script: str) -> Path:
    """Write a shell script as a program, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@contextmanager
def started(*words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start Python, and kill it at the end of the block."""
    command = [sys.executable, *words]
    process = subprocess.Popen(command, cwd=PROJECT, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], object], child: subprocess.Popen[str] | None = None) -> None:
    """Wait until a condition holds; fail after HANG seconds, or if `child` ends."""
    deadline, began = time.monotonic() + HANG, time.thread_time()
    while not condition():
        assert child is None or child.poll() is None, child.communicate()
        assert time.monotonic() < deadline, f"not within {HANG} s"
        # a condition such as a search of /proc would slow down the processes that it waits for
        time.sleep(max(0.02, 5 * (time.thread_time() - began)))
        began = time.thread_time()


def is_alive(pid: int) -> bool:
    """Return whether a process runs; zombies do not."""
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
