"""Functions in fresh processes, which send their results through a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch


class ProcessFailed(Exception):
    """A process ended before its function returned; the message gives the reason."""


def stream(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = 3600,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """Run a function in a fresh process; yield the values that it yields, or its return value.

    The process and its children are killed after `seconds`, or when this generator is closed.

    Args:
        environ: changes of this process's environment.

    Raises:
        ProcessFailed: the process failed or was killed.
    """
    context = multiprocessing.get_context("spawn")
    results, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(writer, function, arguments))
    # patch.dict empties the environment for a moment, which other threads must not see
    with patch.dict(os.environ, environ) if environ else nullcontext():
        process.start()
    writer.close()
    end = time.monotonic() + seconds
    try:
        while results.poll(max(0.0, end - time.monotonic())):
            yield results.recv()
        raise ProcessFailed(f"killed after {seconds:g} s")
    except EOFError:
        process.join(max(0.0, end - time.monotonic()))
    finally:
        if process.is_alive():
            with suppress(ProcessLookupError):  # it has not made its group yet
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
    if process.exitcode:
        raise ProcessFailed(f"exit status {process.exitcode}")


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a function in a fresh process; options and errors as in `stream`."""
    (result,) = stream(function, *arguments, **options)
    return result


def _send(results: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    result = function(*arguments)
    for value in result if isinstance(result, Iterator) else (result,):
        results.send(value)
