"""Starts one worker: its environment, its job, and what its reply means."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, ValidationError

from harness.imports import install_command
from harness.measuring.job import Job, Reply
from harness.measuring.process import (
    RESULT_LIMIT,
    Confinement,
    Ended,
    run_supervised,
    scratch_folder,
)
from harness.sample import Correctness, Kind
from harness.terminal import printable
from harness.workload import WORKLOAD
from quasar_kernels.contract import fork_imports

PROJECT = Path(__file__).resolve().parents[2]

_OWN_CODE = (PROJECT / "harness", PROJECT / "quasar_kernels")
"""What a worker reads of this project."""

_ALLOWED = frozenset({
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTORCH_ALLOC_CONF",
    "PYTHONNOUSERSITE", "PYTHONUSERBASE", "PYTORCH_CUDA_ALLOC_CONF", "QUASAR_NVRTC", "TMPDIR",
    "TRITON_CACHE_DIR", "XDG_CACHE_HOME",
})  # fmt: skip
_ALLOWED_PREFIXES = ("CUDA_", "NVIDIA_")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS")
_KILLED = (-9, 128 + 9)
"""How a worker ends that got SIGKILL, directly and in a confinement."""


@dataclass(frozen=True)
class Options:
    """How workers run.

    Attributes:
        device: `cuda`, `cpu` (which hides the GPUs) or `auto`, as the validator chooses.
        timeout: seconds for each process, everything included.
        stop: when set, the process is ended promptly.
        confinement: isolates the process; None runs it with this user's rights.
    """

    device: str = "auto"
    timeout: float = WORKLOAD.timeout_seconds
    stop: threading.Event | None = None
    confinement: Confinement | None = None


class MeasurementError(Exception):
    """A worker gave no result.

    Attributes:
        reason: what happened, as a sentence.
        kind: `timeout`, `out_of_memory`, `limit` (more than its confinement allows), `gate` (the
            correctness check failed), `import` (this Python lacks a module that the tree imports),
            `crash`, `protocol`, `disturbed` or `stopped`.
        log_tail: the end of what the worker printed, for diagnosis.
        correctness: the result of the correctness check when that is the reason.
        remedy: what to do about it, as a sentence, where the worker knows.
        length: the length in tokens that was measured, where several are.
    """

    def __init__(
        self,
        reason: str,
        kind: Kind,
        log_tail: str = "",
        correctness: Correctness | None = None,
        remedy: str = "",
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind: Kind = kind
        self.log_tail = log_tail
        self.correctness = correctness
        self.remedy = remedy
        self.length: int | None = None

    @property
    def advice(self) -> str:
        """What happened and, where it is known, what to do about it."""
        return f"{self.reason.rstrip('.')}. {self.remedy}" if self.remedy else self.reason

    def explain(self, *, debug: bool = False) -> str:
        """Return kind and advice for a person, and with `debug` the worker's log."""
        text = self.advice if self.kind == "protocol" else f"{self.kind}: {self.advice}"
        if not self.log_tail or self.kind in ("gate", "stopped"):
            return text
        if debug:
            return f"{text}\n{self.log_tail.rstrip()}"
        return f"{text.rstrip('.')}. --debug shows the worker's log."


def child_environment(
    environ: Mapping[str, str], *, device: str, cache: Path | None = None
) -> dict[str, str]:
    """Return the environment of a worker: an allow-list, so that no secret reaches kernel code.

    Args:
        cache: an empty folder for every cache of compiled kernels; None keeps the shared ones.
    """
    env = {
        name: value
        for name, value in environ.items()
        if name in _ALLOWED
        or (name.startswith(_ALLOWED_PREFIXES) and not any(w in name for w in _SECRET_WORDS))
    }
    path = filter(os.path.isabs, environ.get("PYTHONPATH", "").split(os.pathsep))
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(PROJECT), *path]))
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # a measured worktree must stay as it was committed
    env["PYTHONUNBUFFERED"] = "1"  # a killed worker's last output is kept
    # As in the validator's script.
    env["TRITON_PRINT_AUTOTUNING"] = env["TRITON_PRINT_DEBUG"] = "1"
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    if cache is not None:
        env["TRITON_CACHE_DIR"] = str(cache / "triton")
        env["CUDA_CACHE_PATH"] = str(cache / "cuda")
        env["XDG_CACHE_HOME"] = str(cache / "xdg")
    return env


def work(
    job: Mapping[str, JsonValue],
    options: Options,
    *,
    cold_cache: bool = False,
    patience: float = 1.0,
) -> dict[str, JsonValue]:
    """Have a worker do a job and return the body of its reply.

    Args:
        job: fields of a `Job`; the others are added here.
        cold_cache: start with empty kernel caches.
        patience: the process is killed after so many times the options' seconds.

    Raises:
        MeasurementError: it came to no result that can be trusted.
    """
    nonce = secrets.token_hex(16)
    confinement = options.confinement
    parent = confinement.parent if confinement else os.getpid()

    def message(result_fd: int) -> bytes:
        own = {"device": options.device, "result_fd": result_fd, "nonce": nonce, "parent": parent}
        return Job.model_validate({**job, **own}).model_dump_json().encode()

    with scratch_folder("worker-") as folder:
        cache = folder if cold_cache else None
        env = child_environment(os.environ, device=options.device, cache=cache)
        argv = [sys.executable, "-m", "harness.worker", str(job["task"])]
        if confinement:
            tree = [Path(str(job["tree"]))] if "tree" in job else []
            argv = confinement.command(argv, env, folder, [*_OWN_CODE, *tree])
        try:
            ended = run_supervised(
                argv,
                message=message,
                env=env,
                cwd=folder,
                timeout=patience * options.timeout,
                stop=options.stop,
                exceeded=confinement.exceeded if confinement else lambda _: "",
            )
        except OSError as error:
            raise _not_started(argv[0], error) from error
    return read_reply(ended, nonce, options.timeout)


def _not_started(program: str, error: OSError) -> MeasurementError:
    remedy = ""
    if isinstance(error, (PermissionError, FileNotFoundError)):
        remedy = (
            "Let this user execute it, which takes the right to search each folder above it, or "
            "install again as this user: remove .venv and run scripts/install.sh, where PYTHON "
            "names an interpreter that everybody may execute."
        )
    reason = f"{program} cannot be started ({error.strerror})"
    return MeasurementError(reason, "crash", remedy=remedy)


def read_reply(ended: Ended, nonce: str, timeout: float) -> dict[str, JsonValue]:
    """Return the body of a worker's reply.

    Raises:
        MeasurementError: there is none that can be trusted, and why.
    """

    def failure(reason: str, kind: Kind, remedy: str = "") -> MeasurementError:
        return MeasurementError(reason, kind, ended.log_tail, remedy=remedy)

    if ended.stopped:
        raise failure("stopped on request", "stopped")
    # SIGALRM is from its own `GpuLock`
    if ended.timed_out or ended.returncode == -signal.SIGALRM:
        raise failure(f"not done within {timeout:g} s", "timeout")
    if ended.exceeded:
        raise failure(ended.exceeded, "limit")
    if not ended.result:
        raise failure(*_without_result(ended.returncode))
    if len(ended.result) > RESULT_LIMIT or ended.result.count(b"\n") != 1:
        raise failure("the worker did not send exactly one result", "protocol")
    try:
        reply = Reply.model_validate_json(ended.result)
    except ValidationError as error:
        raise failure("the worker's result is malformed", "protocol") from error
    if not secrets.compare_digest(reply.nonce.encode(), nonce.encode()):
        raise failure("the result did not come from the worker", "protocol")
    if reply.failure is not None:
        # The code under test may have worded both, so its remedy is never shown.
        reason = printable(" ".join(reply.reason.split()))
        raise failure(reason, reply.failure, _remedy(reason) if reply.failure == "import" else "")
    if reply.body is None:
        raise failure("the worker's result is empty", "protocol")
    return reply.body


def _without_result(returncode: int) -> tuple[str, Kind]:
    if returncode in _KILLED:
        why = "the worker was killed from outside, most often by the kernel for lack of memory"
        return why, "out_of_memory"
    if returncode == 0:
        return "the worker ended without a result", "protocol"
    return f"the worker died with status {returncode}", "crash"


def _remedy(reason: str) -> str:
    """Return what to do about an import that failed: a command only for a known package."""
    named = re.search(r" needs (?:another )?(\w+)[,:]", reason)
    if named and named[1] in {module.partition(".")[0] for module in fork_imports()}:
        return f"Run {install_command(named[1])}."
    return "Install what it names into this Python, if you trust it, or remove the import."
