"""What every run of pytest needs; it asks for nothing but pytest, as a GPU machine may be bare."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Helpers that assert show their values as tests do; by itself pytest rewrites no other module.
_HELPERS = {path.stem for path in Path(__file__).parent.iterdir()} - {"__init__", "conftest"}
pytest.register_assert_rewrite(*(f"tests.{name}" for name in sorted(_HELPERS)))

# A shell in the background starts its children with Ctrl-C ignored, and theirs would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


MEMORY, MEMORY_BYTES = "/dev/shm", 4 * 2**30  # a folder, and no file in it is named


def _keep_temporary_files_in_memory() -> None:
    """Put the tests' folders where a flush takes no time, if programs may run there.

    Journals and databases wait for the disk at each change, which takes longer than the change.
    """
    try:
        disk = os.statvfs(MEMORY)
    except OSError:
        return
    free = disk.f_bavail * disk.f_frsize
    if os.access(MEMORY, os.W_OK) and not disk.f_flag & os.ST_NOEXEC and free >= MEMORY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


_keep_temporary_files_in_memory()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add --quick, and the timeout of pyproject.toml where pytest-timeout is not installed."""
    parser.addoption(
        "--quick", action="store_true", help="no test may start a process: tests/quick.py"
    )
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds after which pytest-timeout fails a test")


def pytest_configure(config: pytest.Config) -> None:
    """Have --quick refuse processes."""
    if config.getoption("quick"):
        from tests.quick import Quick

        config.pluginmanager.register(Quick())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where torch finds none; torch is imported only to answer that.

    A process that shares the files with others (`pytest -n`) takes those that hold slow tests
    first, so that no process is left with the longest file at the end.
    """
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _logs_end_with_their_test() -> Iterator[None]:
    """Undo what a test does to the logs, and forget the secrets that it has kept out of them.

    Its handlers write to streams that pytest closes, and a secret such as "expired" would be
    redacted in every later test.
    """
    hooks, secrets = (sys.excepthook, threading.excepthook), _secrets()
    before = set(secrets)
    yield
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)
    secrets.clear()
    secrets.update(before)
    if "structlog" in sys.modules:
        sys.modules["structlog"].reset_defaults()
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler).__module__.startswith(("logging", "neurons")):  # pytest's own stay
            root.removeHandler(handler)
            handler.close()
    root.setLevel(logging.WARNING)


def _secrets() -> set[str]:
    """Return the set of the secrets that logs leave out."""
    if find_spec("structlog") is None:  # the GPU machine is bare
        return set()
    from neurons.runtime import observe

    return observe._secrets
