"""Finds the folders from which workers import packages, and those that a sandbox may show.

Workers find packages in a virtual environment, the user site, targets of `.pth` files and
PYTHONPATH. A folder that also contains secrets is withheld. In every other folder, the hidden files
and folders at the top (`.env`, `.git`) are masked.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.measuring.process import Confinement
from harness.measuring.runner import PROJECT, MeasurementError, Options, call, child_environment
from neurons.runtime.errors import ConfigError, Problem
from neurons.runtime.loading import environment

CHECK_SECONDS, SEARCH_SECONDS = 300.0, 60.0
PREFIX_PARTS = ("bin", "lib", "lib64", "include", "pyvenv.cfg")
"""Parts that the sandbox shows of an otherwise withheld prefix, such as a home folder."""

_PRINT_PATHS = """
import json, site, sys
base = site.getuserbase() if site.ENABLE_USER_SITE else ""
print(json.dumps([sys.path, base]))
"""


@dataclass(frozen=True)
class Packages:
    """Paths of the packages that workers import."""

    shown: tuple[str, ...] = ()
    # entries of `sys.path` that a sandbox does not show, each with the reason
    withheld: Mapping[str, str] = field(default_factory=dict)
    user_base: str = ""  # PYTHONUSERBASE of the workers; "" without a user site


def find_packages(private: Iterable[Path] = ()) -> Packages:
    """Return where a worker with this process's environment finds packages.

    A folder that contains one of the `private` paths (wallets, state) is withheld. Raises a
    ConfigError if the interpreter does not start.
    """
    path, user_base = _worker_paths()
    secret = _secret_paths(private)
    shown, withheld = [], {}
    for entry in filter(os.path.exists, dict.fromkeys(path)):
        reason = _reason(entry, secret)
        if not reason:
            shown += [entry, os.path.realpath(entry)]
        elif os.path.realpath(entry) != str(PROJECT.resolve()):
            # the runner itself makes this project's code readable
            withheld[entry] = reason
    shown += [part for prefix in _prefixes() for part in _parts(prefix, secret)]
    shown = [one for one in dict.fromkeys(shown) if not _is_within(one, ["/usr", *shown])]
    return Packages(tuple(shown), withheld, user_base)


def hidden_entries(folder: str) -> Iterator[str]:
    """Yield the hidden files and folders directly in `folder`, which contain no packages."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") and not entry.is_symlink():
                yield entry.path


def check_imports(
    confinement: Confinement | None,
    withheld: Mapping[str, str],
    stop: threading.Event | None = None,
) -> None:
    """Check that a worker can import the packages for measuring; end early once `stop` is set.

    Without a confinement, the worker has this user's rights. Raises a ConfigError with the module
    that cannot be imported, and the remedy.
    """
    missing = _missing(confinement, stop)
    if not missing:
        return
    if confinement is None or _missing(None, stop):
        raise ConfigError(Problem(f"Workers cannot import {missing}.", "Run scripts/install.sh."))
    remedy = "Install the packages where every user may read them: scripts/install.sh makes .venv."
    if withheld:
        entry, reason = next(iter(withheld.items()))
        remedy = (
            f"{entry} is on Python's path, and the sandbox does not show it: {reason}. "
            "Move the packages into a folder that holds nothing else, or run scripts/install.sh, "
            "which makes .venv."
        )
    raise ConfigError(Problem(f"Workers in the sandbox cannot import {missing}.", remedy))


def _missing(confinement: Confinement | None, stop: threading.Event | None) -> str:
    """Return the modules that a worker cannot import; "" if there are none, or after a stop."""
    try:
        reply = call(
            "harness.worker.checks:find_missing",
            options=Options("cpu", CHECK_SECONDS, stop, confinement=confinement),
        )
    except MeasurementError as error:
        if error.kind == "stopped":
            return ""
        last = error.log_tail.strip().splitlines()[-1:]
        return f"the harness ({' '.join([error.reason, *last])})"
    return ", ".join(map(str, reply["texts"]))  # type: ignore[arg-type]


def _worker_paths() -> tuple[list[str], str]:
    with tempfile.TemporaryDirectory(prefix="path-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_PATHS],
            env=child_environment(environment(), device="cpu"),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SEARCH_SECONDS,
            check=False,
        )
    try:
        path, user_base = json.loads(done.stdout)
    except ValueError:
        why = " ".join(done.stderr.split())[-300:]
        problem = f"{sys.executable} does not start: {why}"
        raise ConfigError(Problem(problem, "Run scripts/install.sh.")) from None
    return [one for one in path if os.path.isabs(one)], user_base


def _secret_paths(named: Iterable[Path]) -> dict[str, str]:
    """Return the real paths of secrets, each with a description."""
    secret = {
        tempfile.gettempdir(): "everybody's temporary files",
        "/etc": "this system's settings",
    }
    homes = [os.path.expanduser("~")]
    with suppress(KeyError):  # a user without an account
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    secret |= dict.fromkeys(homes, "this user's files")
    secret |= {str(PROJECT): "this installation's settings"}
    secret |= {str(one): str(one) for one in named}
    return {os.path.realpath(path): what for path, what in secret.items()}


def _reason(entry: str, secret: Mapping[str, str]) -> str:
    """Return why an entry of the path is withheld; "" if it may be shown."""
    real = Path(os.path.realpath(entry))
    inside = (what for path, what in secret.items() if Path(path).is_relative_to(real))
    return next((f"it contains {what}" for what in inside), "")


def _is_within(path: str, folders: Iterable[str]) -> bool:
    """Return whether `path` is visible in one of `folders`; their hidden entries are masked."""
    return any(path.startswith(f"{one}/") and path[len(one) + 1] != "." for one in folders)


def _prefixes() -> Iterator[str]:
    """Yield the targets of the interpreter's links, and its prefixes."""
    program = sys.executable
    while os.path.islink(program):
        program = os.path.normpath(os.path.join(os.path.dirname(program), os.readlink(program)))
        yield program
    for prefix in (sys.base_prefix, sys.base_exec_prefix, sys.prefix):
        yield from (prefix, os.path.realpath(prefix))


def _parts(prefix: str, secret: Mapping[str, str]) -> list[str]:
    if not _reason(prefix, secret):
        return [prefix]
    parts = [os.path.join(prefix, part) for part in PREFIX_PARTS]
    return [part for part in parts if os.path.exists(part)]
