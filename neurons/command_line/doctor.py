"""Checks that this machine and these settings can mine: each failure comes with its remedy."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from harness.imports import install_command
from harness.report import Environment
from harness.runner import MeasurementError, check_import, probe
from harness.source import missing_files
from neurons import identity
from neurons.configuration.settings import Settings
from neurons.errors import ConfigError, Held, Retry
from neurons.git.command import MINIMUM_GIT
from neurons.http.outcomes import http_date
from neurons.mining.publishing.github import check_token
from neurons.processes.machine import gpus
from quasar_kernels.contract import fork_imports

Level = Literal["ok", "warning", "failure"]

PYTHON_MINIMUM = (3, 10)
DISK_NEEDED_GB, DISK_WANTED_GB = 1.0, 5.0
CLOCK_SECONDS = 30.0
HTTP_SECONDS = 10.0
CHAIN_SECONDS = 12.0


@dataclass(frozen=True)
class Finding:
    """What a check found. `remedy` is empty when `level` is ok."""

    name: str
    level: Level
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Finding:
    """A check that passed."""
    return Finding(name, "ok", detail)


def warning(name: str, detail: str, remedy: str) -> Finding:
    """Something that does not stop the miner."""
    return Finding(name, "warning", detail, remedy)


def failure(name: str, detail: str, remedy: str) -> Finding:
    """Something that the miner cannot work with."""
    return Finding(name, "failure", detail, remedy)


def examine(settings: Settings, *, embedded: bool) -> Iterator[Finding]:
    """Yield every check that applies, the quick ones first.

    Args:
        embedded: the run stays on this machine, so nothing outside it is looked at.
    """
    yield from machine(settings)
    if embedded:
        yield ok("settings", "no .env: the whole job runs on this machine (cp .env.example .env)")
        yield scope(settings, embedded=True)
        yield fork(settings)
        return
    yield from environment_file(settings)
    yield scope(settings, embedded=False)
    yield fork(settings)
    yield from wallet(settings)
    yield from api(settings)
    if settings.github_token is not None and not (settings.fork_remote or settings.repo_path):
        yield token(settings)
    yield registration(settings)


def machine(settings: Settings) -> Iterator[Finding]:
    """Yield the checks of this machine alone."""
    yield python()
    yield from software(settings.device)
    yield gpu(settings.device)
    if settings.device == "cuda":
        yield compiler()
    yield nvcc()
    yield git()
    yield disk(settings.state_dir)


def python() -> Finding:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON_MINIMUM:
        return failure("python", version, "Install Python 3.10 to 3.13 and run scripts/install.sh.")
    return ok("python", f"{version} at {sys.executable}")


def software(device: str, look: Callable[..., Environment] = probe) -> Iterator[Finding]:
    """torch and triton, as a child process sees them: this one never imports torch."""
    repair = "Remove .venv and run scripts/install.sh."
    try:
        found = look(device=device)
    except MeasurementError as error:
        tail = error.log_tail.strip().splitlines()
        yield failure("torch", " ".join([error.reason, *tail[-1:]]), repair)
        return
    build = f"CUDA {found.cuda}" if found.cuda else "without CUDA"
    if device == "cuda" and found.device != "cuda":
        yield failure("torch", f"{found.torch}, {build}, sees no GPU", repair)
    else:
        yield ok("torch", f"{found.torch}, {build}")
    if found.triton:
        yield ok("triton", found.triton)
    elif device == "cuda":
        yield failure("triton", "not installed", repair)
    else:
        yield ok("triton", "not installed; a CPU does not need it")


def gpu(device: str) -> Finding:
    """The GPUs and the driver, read from NVML."""
    found = gpus()
    if found:
        names = ", ".join(f"{one.name} ({one.memory_mb / 1024:.0f} GiB)" for one in found)
        return ok("gpu", f"{names}, driver {found[0].driver}")
    if device == "cuda":
        remedy = "Check `nvidia-smi`; install or reload the driver, or set DEVICE=cpu."
        return failure("gpu", "NVML finds no NVIDIA GPU", remedy)
    return ok("gpu", "none: only short lengths are measured, and no claim for a subnet comes of it")


def compiler() -> Finding:
    """The C compiler and Python's headers, with which Triton builds its launcher on a GPU."""
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    path = shutil.which("gcc") or shutil.which("clang")
    if path and header.is_file():
        return ok("compiler", path)
    missing = f"{header} is missing" if path else "neither gcc nor clang is found"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"On Debian and Ubuntu: sudo apt install gcc {version}-dev"
    return failure("compiler", f"{missing}: Triton cannot start kernels", remedy)


def nvcc() -> Finding:
    """The CUDA compiler, which only people who change the .cu files need."""
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        return ok("nvcc", "not found; only changes to the .cu files need it")
    release = re.search(r"release ([\d.]+)", _output([path, "--version"]))
    return ok("nvcc", f"{release[1] if release else 'unknown release'} at {path}")


def git() -> Finding:
    """The git program."""
    text = _output(["git", "--version"])
    numbers = re.search(r"(\d+)\.(\d+)", text)
    install = "On Debian and Ubuntu: sudo apt install git"
    if numbers is None:
        return failure("git", "not found", install)
    if (int(numbers[1]), int(numbers[2])) < MINIMUM_GIT:
        least = ".".join(map(str, MINIMUM_GIT))
        return failure("git", text, f"git {least} or newer is needed. {install}")
    return ok("git", text)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def disk(folder: Path) -> Finding:
    """Free space where the state lies, and the right to write there."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(present, os.W_OK):
        return failure("disk", f"{present} cannot be written", "Mend its owner, or set STATE_DIR.")
    free = shutil.disk_usage(present).free / 1e9
    detail = f"{free:.1f} GB free at {present}"
    if free < DISK_NEEDED_GB:
        return failure("disk", detail, f"Free {DISK_NEEDED_GB:g} GB, or set STATE_DIR elsewhere.")
    if free < DISK_WANTED_GB:
        return warning("disk", detail, f"{DISK_WANTED_GB:g} GB are comfortable.")
    return ok("disk", detail)


def environment_file(settings: Settings) -> Iterator[Finding]:
    """What the .env holds that is worth a look; its values were checked when it was read."""
    for problem, remedy in settings.warnings:
        yield warning(".env", problem, remedy or "Remove the line from .env.")
    if not settings.warnings:
        yield ok(".env", "every line is understood and nobody else can read it")


def scope(settings: Settings, *, embedded: bool) -> Finding:
    """What of the kernels is published."""
    if settings.fork_scope == "layer":
        return ok("scope", "publishes the operator and the layer")
    if embedded:
        detail = "FORK_SCOPE=ops, but the fork on this machine has no layer."
        return failure("scope", detail, "Unset it.")
    return ok("scope", "publishes fla/ops/quasar alone; the fork's own layer is measured")


def fork(settings: Settings) -> Finding:
    """Whether the fork's code can be imported here: a child imports it, this process never does."""
    tree = settings.repo_path or settings.state_dir / "fork"
    if missing_files(tree):
        needed = sorted({module.split(".")[0] for module in fork_imports()})
        for module in needed:
            if importlib.util.find_spec(module) is None:
                detail = f"it needs {module}, which is not installed"
                return failure("fork", detail, f"Run {install_command(module)}.")
        have = ", ".join(needed)
        return ok("fork", f"imported once it is prepared; what that needs is installed: {have}")
    try:
        seconds = check_import(tree)
    except MeasurementError as error:
        own_words = f"`python -m harness --tree {tree}` shows the process's own words."
        detail = f"{tree} cannot be imported: {error.reason}"
        return failure("fork", detail, error.remedy or own_words)
    return ok("fork", f"imported from {tree} in {seconds:.1f} s")


def wallet(settings: Settings) -> Iterator[Finding]:
    """The hotkey's file."""
    try:
        me = identity.load_identity(*settings.miner_wallet)
    except ConfigError as error:
        yield from (failure("wallet", *one) for one in error.problems)
        return
    yield ok("wallet", f"hotkey {me.hotkey}")
    yield from (warning("wallet", *one) for one in identity.wallet_warnings(*settings.miner_wallet))


def api(settings: Settings) -> Iterator[Finding]:
    """The validator API, and its clock against this machine's."""
    url = str(settings.validator_api_url)
    try:
        reply = httpx.get(f"{url}/health", timeout=HTTP_SECONDS)
    except httpx.HTTPError as error:
        detail = f"{url} does not answer ({type(error).__name__})"
        yield failure("api", detail, "Check VALIDATOR_API_URL and the network.")
        return
    if reply.status_code != 200:
        detail = f"{url}/health answers {reply.status_code}"
        yield failure("api", detail, "Check VALIDATOR_API_URL.")
        return
    yield ok("api", f"{url} is up")
    there = http_date(reply.headers.get("Date", ""))
    if there is None:
        return
    # The Date header counts whole seconds and was written up to one round trip ago.
    offset = time.time() - there
    detail = f"this machine's clock is {offset:+.0f} s from the server's"
    if abs(offset) > CLOCK_SECONDS:
        yield warning("clock", detail, "Switch on NTP: timedatectl set-ntp true")
    else:
        yield ok("clock", detail)


def token(settings: Settings) -> Finding:
    """Whose the GitHub token is and what it may do."""
    secret = settings.github_token.get_secret_value() if settings.github_token else ""
    try:
        scopes = check_token(settings.github_api_url, secret, settings.github_username or "")
    except Held as held:
        return failure("token", held.reason, held.remedy)
    except Retry as fault:
        detail = f"GitHub does not answer as it should: {fault.reason}"
        return failure("token", detail, "Check the network.")
    except ConfigError as error:
        return failure("token", str(error), "Set GITHUB_API_URL to an https address.")
    owner = settings.github_username
    if scopes is None:  # a fine-grained token does not tell its permissions
        return ok("token", f"fine-grained token of {owner}; Contents and Administration must be on")
    return ok("token", f"classic token of {owner} with {', '.join(sorted(scopes))}")


def registration(settings: Settings) -> Finding:
    """The hotkey's uid on the subnet."""
    if settings.subtensor_network == identity.OFFLINE:
        return ok("registration", "not looked up: SUBTENSOR_NETWORK=offline")
    try:
        hotkey = identity.load_identity(*settings.miner_wallet).hotkey
        uid = identity.registered_uid(
            hotkey, settings.netuid, settings.subtensor_network, CHAIN_SECONDS
        )
    except ConfigError:
        return warning("registration", "unknown without a hotkey", "See the wallet's line.")
    except identity.ChainUnreachable as error:
        return warning("registration", str(error), "Check SUBTENSOR_NETWORK; mining goes on.")
    if uid is None:
        command = f"btcli subnets register --netuid {settings.netuid}"
        return warning("registration", f"{hotkey} is not on subnet {settings.netuid}", command)
    return ok("registration", f"uid {uid} on subnet {settings.netuid}")
