"""git with a restricted environment, deadlines, and errors that name a remedy.

GitPython passes this process's whole environment to every git process, and git reads hooks, helpers
and rewrites from many files. Here, a git process gets few variables, no system or user settings, no
hooks, no prompts, and only the transport that its remote needs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neurons.runtime.errors import ConfigError, Held, Retry
from neurons.runtime.git.faults import fault
from neurons.runtime.git.remote import Remote, Token
from neurons.runtime.loading import environment

# Without this variable, importing GitPython on a machine without git raises a long ImportError.
environment().setdefault("GIT_PYTHON_REFRESH", "quiet")

import git  # noqa: E402 # it reads the variable

MINIMUM_GIT = (2, 32)
"""The first version of git that can take all its settings from the environment."""

_ACCEPTED: set[str] = set()
"""Values of PATH with which git is known to be new enough."""

_INHERITED = re.compile(
    r"PATH|TMPDIR|LD_LIBRARY_PATH|SSH_AUTH_SOCK|SSL_CERT_(FILE|DIR)|(https?|all|no)_proxy", re.I
)

_ENVIRONMENT = {
    "LC_ALL": "C",  # faults are recognised by git's English words
    "HOME": os.devnull,  # no ~/.netrc, ~/.gitconfig, ~/.config/git
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",  # outranks a repository's core.sshCommand
    "GIT_ALLOW_PROTOCOL": "",  # no transport at all, unless a call names its remote
    "GIT_PROTOCOL_FROM_USER": "0",
    "GIT_LITERAL_PATHSPECS": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
}

_CONFIG = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.fsync": "committed,reference",  # a commit that was submitted survives a power cut
    "credential.helper": "",
    "http.followRedirects": "false",  # the token is for one host
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    "gc.auto": "0",  # nothing may outlive the call in the background
    "maintenance.auto": "false",
}


@dataclass(frozen=True)
class Limits:
    """Limits of a git process that works on an untrusted repository."""

    memory: int  # bytes of address space
    file: int  # bytes of each file that it writes
    seconds: int  # of CPU time
    output: int  # bytes

    def around(self, command: list[str]) -> list[str]:
        limits = [f"--as={self.memory}", f"--fsize={self.file}", f"--cpu={self.seconds}"]
        return ["prlimit", *limits, "--core=0", "--", *command]


_AT_LIMIT = {
    "SIGXFSZ": "the limit of {0.file} bytes for a file",
    "SIGXCPU": "the limit of {0.seconds} s of CPU time",
    "SIGKILL": "a limit: {0.seconds} s of CPU time, {0.memory} bytes of memory, "
    "{0.output} bytes of output",
}
"""The limit that a process has exceeded, by the signal that ended it."""


class HardenedGit(git.Git):
    """GitPython's command object with hardened processes.

    Commands are methods as in GitPython (`tool.rev_parse("HEAD")`). A failing command raises
    Held or Retry.
    """

    def __init__(
        self,
        folder: Path,
        *,
        timeout: float = 120.0,
        stop: threading.Event | None = None,
        overrides: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.timeout = timeout
        self.stop = stop
        self.overrides = dict(overrides or {})
        self.limits = limits

    def online(
        self, remote: Remote, token: Token | None, command: str, *args: str, timeout: float = 0
    ) -> str:
        """Run a command that connects to `remote`; `token` is sent only to the token's host."""
        env = {"GIT_ALLOW_PROTOCOL": remote.protocol}
        config = dict(self.overrides)
        if token and remote.protocol in ("http", "https") and token.host == remote.host:
            config[f"http.{remote.origin}.extraHeader"] = f"Authorization: Basic {token.basic}"
        env.update(self._configuration(config))
        return str(
            self._call_process(command, *args, env=env, kill_after_timeout=timeout or self.timeout)
        )

    def probe(self, command: str, *args: str) -> str | None:
        """Run a command that may fail; return its output, or None if it fails."""
        result: Any = self._call_process(
            command, *args, with_extended_output=True, with_exceptions=False
        )
        return str(result[1]) if result[0] == 0 else None

    def execute(self, command: Any, *args: Any, **options: Any) -> Any:
        """Run git with a clean environment, in its own process group, under a deadline."""
        if command[1:] != ["version"]:
            self._require_version()
        env = {name: value for name, value in environment().items() if _INHERITED.fullmatch(name)}
        env |= _ENVIRONMENT | self._configuration(self.overrides)
        # If the clone is damaged, git must not use a repository in a parent folder.
        env["GIT_CEILING_DIRECTORIES"] = str(self.folder.resolve().parent)
        env |= options.get("env") or {}
        timeout = options.get("kill_after_timeout") or self.timeout
        status, output, complaint = self._run([str(word) for word in command], env, timeout)
        if status != 0 and options.get("with_exceptions", True):
            raise fault(str(command[1]), complaint.strip() or self._end_of(status), self.folder)
        if options.get("with_extended_output"):
            return status, output, complaint
        return output

    def _end_of(self, status: int) -> str:
        """Return how git ended, for an error without a message."""
        if status >= 0:
            return f"it ended with status {status} and without a message"
        name = signal.Signals(-status).name
        if self.limits is None or name not in _AT_LIMIT:
            return f"it was killed by {name}"
        limit = _AT_LIMIT[name].format(self.limits)
        return f"it exceeded {limit}"

    def _require_version(self) -> None:
        """Raise a ConfigError for an old git; check once for each PATH."""
        path = environment().get("PATH", "")
        if path not in _ACCEPTED:
            if self.version_info < MINIMUM_GIT:
                version, least = (".".join(map(str, v)) for v in (self.version_info, MINIMUM_GIT))
                raise ConfigError(f"git {version} is too old. Install git {least} or newer.")
            _ACCEPTED.add(path)

    def _configuration(self, config: Mapping[str, str]) -> dict[str, str]:
        """Return the settings as environment variables: they outrank a repository's own."""
        items = list((_CONFIG | dict(config)).items())
        env = {"GIT_CONFIG_COUNT": str(len(items))}
        for index, (key, value) in enumerate(items):
            env[f"GIT_CONFIG_KEY_{index}"] = key
            env[f"GIT_CONFIG_VALUE_{index}"] = value
        return env

    def _run(self, command: list[str], env: dict[str, str], timeout: float) -> tuple[int, str, str]:
        if not self.folder.is_dir():
            raise Held(f"The folder {self.folder} is missing.", "Restore it, or correct REPO_PATH.")
        limits = self.limits
        words = limits.around(command) if limits else command
        try:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            package = "util-linux" if words[0] == "prlimit" else "git"
            raise ConfigError(
                f"{words[0]} is not installed. Install it: apt-get install {package}."
            ) from None
        except OSError as error:  # too many processes or files, or too little memory
            raise Retry(f"git cannot be started ({error.strerror}).") from error
        deadline = time.monotonic() + timeout
        if limits:
            _bound_output(process, limits.output)
        try:
            while True:
                if self.stop is not None and self.stop.is_set():
                    raise Retry(f"git {command[1]} was stopped.")
                if time.monotonic() >= deadline:
                    raise Retry(f"git {command[1]} took longer than {timeout:g} seconds.")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, complaint = process.communicate(timeout=0.1)
                    break
        except BaseException:
            _end(process)
            raise
        text = output.decode("utf-8", "surrogateescape").removesuffix("\n")
        return process.returncode, text, complaint.decode("utf-8", "replace")


def _bound_output(process: subprocess.Popen[bytes], most: int) -> None:
    """Kill a process that prints more than `most` bytes; drop the data that exceeds the limit."""
    assert process.stdout is not None  # noqa: S101 # it is a pipe
    inner, outer = os.pipe()
    source, process.stdout = process.stdout, os.fdopen(inner, "rb")

    def carry() -> None:
        left = most
        with source, os.fdopen(outer, "wb", buffering=0) as target:
            while data := source.read1(2**16):  # type: ignore[attr-defined] # a buffered reader
                left -= len(data)
                if left < 0:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    return
                with contextlib.suppress(OSError):  # the caller no longer reads
                    target.write(data)

    threading.Thread(target=carry, name="git output", daemon=True).start()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill git and its helpers, which share a process group and may outlive git."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


AUTHOR = "quasar-miner <quasar-miner@users.noreply.github.com>"


def commit_environment(seconds: int) -> dict[str, str]:
    """Return variables that set AUTHOR and a commit's time, `seconds` since 1970 in UTC."""
    name, email = AUTHOR.rstrip(">").split(" <")
    values = {"NAME": name, "EMAIL": email, "DATE": f"@{seconds} +0000"}
    return {f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in values.items()}


@contextlib.contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """Create a temporary folder beside `path`; the caller renames its content to `path`.

    Folders that a killed process left there are removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.partial-"
    for leftover in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as scratch:
        yield Path(scratch)
