"""Set-up of all tests. It needs only pytest, because GPU machines may have no other package."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Let assertions in helpers show their values; by default pytest rewrites only test modules.
_HELPERS = {path.stem for path in Path(__file__).parent.iterdir()} - {"__init__", "conftest"}
pytest.register_assert_rewrite(*(f"tests.{name}" for name in sorted(_HELPERS)))

# A background job of a shell ignores Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if find_spec("hypothesis"):  # a busy machine draws and tries examples slowly
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")

MEMORY, MEMORY_BYTES = "/dev/shm", 4 * 2**30
LONG_SECONDS = 50.0
"""After this time, a test that still runs is named on stderr: it may hang."""
_stderr = pytest.StashKey[int]()


def _keep_temporary_files_in_memory() -> None:
    """Put the tests' temporary folders in memory, if it is large enough and allows programs.

    Journals and databases flush to the disk at each change, which is slow.
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
        "--quick", action="store_true", help="fail tests that start a process or load NVRTC"
    )
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds after which pytest-timeout fails a test")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin of --quick, and keep the stderr that tests do not capture."""
    config.stash[_stderr] = os.dup(2)
    if config.getoption("quick"):
        from tests.quick import Quick

        config.pluginmanager.register(Quick())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip nightly tests, and GPU tests without a GPU; torch is imported only if there are any.

    With `pytest -n`, files with slow tests run first, so that no long file remains at the end.
    """
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
    if not os.environ.get("QUASAR_NIGHTLY"):
        skip = pytest.mark.skip(reason="takes long: make nightly")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(skip)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Name a test that runs for long, before its timeout ends it."""
    line = f"{item.nodeid} has been running for {LONG_SECONDS:.0f} s\n".encode()
    timer = threading.Timer(LONG_SECONDS, os.write, (item.config.stash[_stderr], line))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


@pytest.fixture
def hangups() -> Iterator[None]:
    """Give SIGHUP its usual effect on this process and its children, which nohup takes away."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.fixture(autouse=True)
def _logs_end_with_their_test() -> Iterator[None]:
    """Undo a test's changes to logging, and forget the secrets that it registered for redaction.

    Handlers of a test write to streams that pytest closes, and a secret such as "expired" would be
    redacted in all later tests.
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
        if type(handler).__module__.startswith(("logging", "neurons")):  # not pytest's
            root.removeHandler(handler)
            handler.close()
    root.setLevel(logging.WARNING)


def _secrets() -> set[str]:
    """Return the set of secrets that logs redact."""
    if find_spec("structlog") is None:  # on a GPU machine
        return set()
    from neurons.runtime import observe

    return observe._secrets
