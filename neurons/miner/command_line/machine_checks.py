"""The doctor's checks of this machine (programs, GPU, compiler, disk), and their results."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from harness.hardware.machine import Environment
from harness.measuring.runner import MeasurementError, Options, probe
from neurons.miner.command_line.metrics import INSTALL
from neurons.runtime.git.command import MINIMUM_GIT
from neurons.runtime.machine import gpus
from neurons.runtime.settings import Settings

Level = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. `remedy` is empty if `level` is ok."""

    name: str
    level: Level
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def warning(name: str, detail: str, remedy: str) -> Finding:
    """Return the finding of a fault with which the miner can work."""
    return Finding(name, "warning", detail, remedy)


def failure(name: str, detail: str, remedy: str) -> Finding:
    """Return the finding of a fault with which the miner cannot work."""
    return Finding(name, "failure", detail, remedy)


PYTHON_MINIMUM = (3, 10)
DISK_NEEDED_GB, DISK_WANTED_GB = 1.0, 5.0


def machine(settings: Settings) -> Iterator[Finding]:
    """Yield the findings about this machine; the checks use no network."""
    yield python()
    yield from software(settings.device)
    yield gpu(settings.device)
    if settings.device == "cuda":
        yield compiler()
    yield git()
    yield disk(settings.state_dir)
    if settings.metrics_port is not None and find_spec("prometheus_client") is None:
        problem = f"METRICS_PORT={settings.metrics_port} needs prometheus-client"
        yield failure("metrics", problem, INSTALL)
    if settings.tune_command:
        yield program("optimiser", "TUNE_COMMAND", settings.tune_words[0])
    if settings.alert_command:
        word = settings.words_of(settings.alert_command)[0]
        yield program("alerts", "ALERT_COMMAND", word, warning)
    if settings.journal_copy:
        yield journal_copy(settings.journal_copy, settings.state_dir)


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON_MINIMUM:
        return failure(
            "python", version, "Install Python 3.10 to 3.13 and run scripts/install.sh miner."
        )
    return ok("python", f"{version} at {sys.executable}")


def software(device: str, probe: Callable[..., Environment] = probe) -> Iterator[Finding]:
    """Check torch and triton in a child process, because this process never imports torch."""
    repair = "Remove .venv and run scripts/install.sh miner."
    try:
        environment = probe(Options(device))
    except MeasurementError as error:
        tail = error.log_tail.strip().splitlines()
        yield failure("torch", " ".join([error.reason, *tail[-1:]]), error.remedy or repair)
        return
    build = f"CUDA {environment.cuda}" if environment.cuda else "without CUDA"
    if device == "cuda" and environment.device != "cuda":
        yield failure("torch", f"{environment.torch}, {build}, sees no GPU", repair)
    else:
        yield ok("torch", f"{environment.torch}, {build}")
    if environment.triton:
        yield ok("triton", environment.triton)
    elif device == "cuda":
        yield failure("triton", "not installed", repair)
    else:
        yield ok("triton", "not installed; a CPU does not need it")


def gpu(device: str) -> Finding:
    devices = gpus()
    if devices:
        sizes = {one: f" ({one.memory_mb / 1024:.0f} GiB)" for one in devices if one.memory_mb}
        names = ", ".join(f"{one.name}{sizes.get(one, '')}" for one in devices)
        return ok("gpu", f"{names}, driver {devices[0].driver}")
    if device == "cuda":
        remedy = "Check `nvidia-smi`; install or reload the driver, or set DEVICE=cpu."
        return failure("gpu", "NVML finds no NVIDIA GPU", remedy)
    return ok("gpu", "none: only short lengths are measured, for trials")


def compiler() -> Finding:
    """Check the C compiler and Python's headers, with which Triton builds its GPU launcher."""
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    path = shutil.which("gcc") or shutil.which("clang")
    if path and header.is_file():
        return ok("compiler", path)
    missing = f"{header} is missing" if path else "neither gcc nor clang is found"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"On Debian and Ubuntu: sudo apt install gcc {version}-dev"
    return failure("compiler", f"{missing}: Triton cannot start kernels", remedy)


def git() -> Finding:
    try:
        command = ["git", "--version"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        text = ""
    numbers = re.search(r"(\d+)\.(\d+)", text)
    install = "On Debian and Ubuntu: sudo apt install git"
    if numbers is None:
        return failure("git", "not found", install)
    if (int(numbers[1]), int(numbers[2])) < MINIMUM_GIT:
        least = ".".join(map(str, MINIMUM_GIT))
        return failure("git", text, f"git {least} or newer is needed. {install}")
    return ok("git", text)


def program(
    name: str, setting: str, word: str, fault: Callable[[str, str, str], Finding] = failure
) -> Finding:
    """Check the program that a setting's command starts."""
    if shutil.which(word) is None:
        remedy = "Name a program of the PATH, or a file that may be executed."
        return fault(name, f"{setting}: there is no program {word}", remedy)
    return ok(name, word)


def journal_copy(folder: Path, state_dir: Path) -> Finding:
    """Check that the journal's copy can be written, and is on another disk than the journal."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        detail = f"JOURNAL_COPY={folder} cannot be written ({error.strerror})"
        return warning("journal copy", detail, "Mount its disk, and give this user the folder.")
    present = next(path for path in (state_dir, *state_dir.parents) if os.path.exists(path))
    if folder.stat().st_dev == present.stat().st_dev:
        detail = f"JOURNAL_COPY={folder} is on the same disk as STATE_DIR"
        return warning("journal copy", detail, "Name a folder on another disk or mount.")
    return ok("journal copy", str(folder))


def disk(folder: Path) -> Finding:
    # unlike Path.exists, os.path.exists raises no error for a folder that this user cannot enter
    present = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    free = shutil.disk_usage(present).free / 1e9
    detail = f"{free:.1f} GB free at {present}"
    if free < DISK_NEEDED_GB:
        return failure("disk", detail, f"Free {DISK_NEEDED_GB:g} GB, or set STATE_DIR elsewhere.")
    try:
        tempfile.TemporaryFile(dir=present).close()
    except OSError as error:
        detail = f"{present} cannot be written ({error.strerror})"
        return failure("disk", detail, "Give it to this user, or set STATE_DIR elsewhere.")
    if free < DISK_WANTED_GB:
        return warning("disk", detail, f"{DISK_WANTED_GB:g} GB are recommended.")
    return ok("disk", detail)
