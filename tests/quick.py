"""`pytest --quick`: the tests that start no process, compile nothing and are not marked slow.

No list says which tests those are. Python reports each start of a process, and each library that is
loaded, to an audit hook (PEP 578). The hook stops the test that does so, which is then skipped.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
REASON = "--quick: it starts a process or compiles"


class Quick:
    """The plugin; `stopped` tells whether the test at hand was stopped."""

    def __init__(self) -> None:
        self.runs = self.stopped = False
        signal.signal(signal.SIGUSR1, self._stop)
        sys.addaudithook(self._watch)

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        compiles = event == "ctypes.dlopen" and "nvrtc" in str(arguments[0])
        if self.runs and (event in STARTS or compiles):
            self.stopped = True
            if threading.current_thread() is not threading.main_thread():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            pytest.skip(REASON)

    def _stop(self, *_: object) -> None:
        if self.runs:
            pytest.skip(REASON)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what is marked."""
        marked = [item for item in items if any(map(item.get_closest_marker, ("slow", "gpu")))]
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in set(marked)]

    def pytest_runtest_logstart(self) -> None:
        """Begin with a test."""
        self.stopped = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        """Watch what fixtures do."""
        return (yield from self._watched())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Watch what the test does."""
        return (yield from self._watched())

    def _watched(self) -> Iterator[None]:
        self.runs = True
        try:
            return (yield)
        finally:
            self.runs = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Count what was stopped as skipped, whatever the test or a shared fixture made of it."""
        report: Any = yield
        error = call.excinfo.value if call.excinfo else None
        while error is not None and not self.stopped:
            self.stopped = isinstance(error, pytest.skip.Exception) and error.msg == REASON
            error = error.__cause__ or error.__context__
        if self.stopped and report.failed:
            path, line, _ = item.location
            report.outcome, report.longrepr = "skipped", (path, line, f"Skipped: {REASON}")
        return report
