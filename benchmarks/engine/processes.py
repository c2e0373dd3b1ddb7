"""Functions in fresh processes, which send their results as lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from benchmarks.engine.results import ROOT


class Lost(Exception):
    """A process ended before its function returned; the message gives the reason."""


def command(function: Callable[..., Any], *arguments: Any, results: int = 1) -> list[str]:
    """Return the command that calls a function of a module.

    Args:
        arguments: JSON values.
        results: file descriptor for the returned or yielded values, one line for each.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    call = json.dumps([name, arguments, results], default=str)
    return [sys.executable, "-m", "benchmarks.engine.processes", call]


def stream(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = 3600,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """Run a function in a fresh process; yield the values that it yields, or its return value.

    The process and its children are killed after `seconds`, or when this generator is closed.

    Raises:
        Lost: the process failed or was killed.
    """
    results, theirs = os.pipe()
    process = subprocess.Popen(
        command(function, *arguments, results=theirs),
        cwd=ROOT,
        env=environ,
        pass_fds=(theirs,),
        start_new_session=True,
    )
    os.close(theirs)
    late = threading.Event()

    def kill() -> None:
        late.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        with os.fdopen(results) as lines:
            for line in lines:
                yield json.loads(line)
        status = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            kill()
            process.wait()
    if status:
        raise Lost(f"killed after {seconds:g} s" if late.is_set() else f"exit status {status}")


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a function in a fresh process; options and errors as in `stream`."""
    (result,) = stream(function, *arguments, **options)
    return result


def _main() -> None:
    name, arguments, results = json.loads(sys.argv[1])
    module, _, function = name.partition(":")
    result = getattr(import_module(module), function)(*arguments)
    with os.fdopen(results, "w", buffering=1, closefd=False) as lines:
        for one in result if isinstance(result, Iterator) else (result,):
            value = one.model_dump(mode="json") if isinstance(one, BaseModel) else one
            lines.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    _main()
