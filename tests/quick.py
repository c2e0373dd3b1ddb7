"""`pytest --quick` fails tests that start a process or load NVRTC."""

import sys
from collections.abc import Generator
from typing import Any

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}


class Quick:
    """A pytest plugin with an audit hook (PEP 578) for starts of processes and loaded libraries."""

    def __init__(self) -> None:
        self._runs = False
        sys.addaudithook(self._watch)

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        compiles = event == "ctypes.dlopen" and "nvrtc" in str(arguments[0])
        if self._runs and (event in STARTS or compiles):
            raise RuntimeError(f"{event} in a quick test: remove its file from tests/quick.txt")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._runs = True
        try:
            return (yield)
        finally:
            self._runs = False
