"""Starts workers and judges what they answer: one cold process for each measurement."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from harness.imports import install_command
from harness.measuring.job import Job, Reply
from harness.measuring.process import (
    RESULT_LIMIT,
    Confinement,
    Ended,
    run_supervised,
    scratch_folder,
)
from harness.report import Environment, GateResult, Kind, Measurement
from harness.source import missing_files, source_digest, unreadable_files
from harness.terminal import printable
from harness.workload import ORACLE_LENGTH, WORKLOAD
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
_KILLED = (-9, 128 + 9)
"""How a worker ends that got SIGKILL, and what a confinement says of it."""
Model = TypeVar("Model", bound=BaseModel)
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS")

Gate = bool | GateResult | Callable[[], GateResult]
"""Whether the code is checked first, the result of an earlier check, or one that is still made."""

PATIENCE = 20
"""A process that shares a turn is killed after so many times its own seconds, waits included."""


class Measure(Protocol):
    """`measure`, or its stand-in."""

    def __call__(
        self,
        tree: Path,
        length: int,
        *,
        device: str,
        gate: Gate,
        timeout: float,
        stop: threading.Event | None,
        cold_cache: bool,
        confinement: Confinement | None = None,
        turn: Path | None = None,
        proven: bool = False,
    ) -> Measurement:
        """Time one length in a fresh process."""


class MeasurementError(Exception):
    """A worker gave no measurement.

    Attributes:
        reason: what happened, as a sentence.
        kind: `timeout`, `out_of_memory`, `limit` (more than its confinement allows), `gate`,
            `import` (this Python lacks a module that the tree imports), `crash`, `protocol`,
            `disturbed` or `stopped`.
        log_tail: the end of what the worker printed, for diagnosis.
        gate: the gate's result when that is the reason.
        remedy: what to do about it, as a sentence, where the worker knows.
    """

    def __init__(
        self,
        reason: str,
        kind: Kind,
        log_tail: str = "",
        gate: GateResult | None = None,
        remedy: str = "",
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind: Kind = kind
        self.log_tail = log_tail
        self.gate = gate
        self.remedy = remedy

    @property
    def advice(self) -> str:
        """What happened and, where it is known, what to do about it."""
        return f"{self.reason.rstrip('.')}. {self.remedy}" if self.remedy else self.reason

    def explain(self, *, debug: bool = False) -> str:
        """Return kind and advice for a person, with the worker's log if `debug` asks for it."""
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
    env["PYTHONUNBUFFERED"] = "1"  # a killed worker's last words are kept
    # As in the validator's script.
    env["TRITON_PRINT_AUTOTUNING"] = env["TRITON_PRINT_DEBUG"] = "1"
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    if cache is not None:
        env["TRITON_CACHE_DIR"] = str(cache / "triton")
        env["CUDA_CACHE_PATH"] = str(cache / "cuda")
        env["XDG_CACHE_HOME"] = str(cache / "xdg")
    return env


def _judge(ended: Ended, nonce: str, timeout: float) -> dict[str, JsonValue]:
    """Return the body of a worker's reply, or raise why there is none that can be trusted."""

    def failure(reason: str, kind: Kind, remedy: str = "") -> MeasurementError:
        return MeasurementError(reason, kind, ended.log_tail, remedy=remedy)

    if ended.stopped:
        raise failure("stopped on request", "stopped")
    if ended.timed_out:
        raise failure(f"not done within {timeout:g} s", "timeout")
    if ended.returncode == -signal.SIGALRM:  # from its own `Turn`
        raise failure("not done within its seconds", "timeout")
    if ended.exceeded:
        raise failure(ended.exceeded, "limit")
    if not ended.result:
        if ended.returncode in _KILLED:
            why = "the worker was killed from outside, most often by the kernel for lack of memory"
            raise failure(why, "out_of_memory")
        if ended.returncode == 0:
            raise failure("the worker ended without a result", "protocol")
        raise failure(f"the worker died with status {ended.returncode}", "crash")
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


def _remedy(reason: str) -> str:
    """Return what to do about an import that failed: a command only for a known package."""
    named = re.search(r" needs (?:another )?(\w+)[,:]", reason)
    if named and named[1] in {module.partition(".")[0] for module in fork_imports()}:
        return f"Run {install_command(named[1])}."
    return "Install what it names into this Python, if you trust it, or remove the import."


def _not_started(program: str, error: OSError) -> MeasurementError:
    remedy = ""
    if isinstance(error, (PermissionError, FileNotFoundError)):
        remedy = (
            "Let this user execute it, which takes the right to search each folder above it, or "
            "install anew as this user: remove .venv and run scripts/install.sh, where PYTHON "
            "names an interpreter that everybody may execute."
        )
    return MeasurementError(
        f"{program} cannot be started ({error.strerror})", "crash", "", None, remedy
    )


def _work(
    job: Mapping[str, JsonValue],
    *,
    device: str,
    timeout: float,
    stop: threading.Event | None = None,
    cold_cache: bool = False,
    confinement: Confinement | None = None,
) -> dict[str, JsonValue]:
    nonce = secrets.token_hex(16)
    parent = confinement.parent if confinement else os.getpid()

    def message(result_fd: int) -> bytes:
        fields = {**job, "device": device, "result_fd": result_fd, "nonce": nonce}
        return Job.model_validate({**fields, "parent": parent}).model_dump_json().encode()

    with scratch_folder("worker-") as folder:
        env = child_environment(os.environ, device=device, cache=folder if cold_cache else None)
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
                timeout=timeout,
                stop=stop,
                exceeded=confinement.exceeded if confinement else lambda _: "",
            )
        except OSError as error:
            raise _not_started(argv[0], error) from error
    return _judge(ended, nonce, timeout)


def _tree_job(task: str, tree: Path, length: int) -> dict[str, JsonValue]:
    missing = missing_files(tree)
    if missing:
        raise MeasurementError(
            f"{tree} has no {missing[0]}; name the root of a fork that holds it", "protocol"
        )
    if compiled := unreadable_files(tree):
        reason = f"fla/{compiled[0]} is compiled: nobody can read what it does"
        raise MeasurementError(reason, "gate", remedy="Publish its source instead.")
    digest = source_digest(tree)
    return {"task": task, "tree": str(tree), "length": length, "source_digest": digest}


def probe(
    *,
    device: str = "auto",
    timeout: float = 120.0,
    stop: threading.Event | None = None,
    confinement: Confinement | None = None,
) -> Environment:
    """Return the machine as a worker sees it, the resolved device included.

    Raises:
        MeasurementError: torch cannot be imported, or the device asked for is not there.
    """
    body = _work(
        {"task": "probe"}, device=device, timeout=timeout, stop=stop, confinement=confinement
    )
    return Environment.model_validate(body)


def call(
    function: str,
    *arguments: JsonValue,
    device: str,
    timeout: float,
    stop: threading.Event | None = None,
    tree: Path | None = None,
    confinement: Confinement | None = None,
) -> dict[str, JsonValue]:
    """Call a function of this project in a fresh process with empty caches of compiled kernels.

    Args:
        function: `module:name`; it returns a pydantic model.
        device: `cpu` hides the GPUs from it.
        tree: a folder that it reads, which a confinement then lets it see.

    Returns:
        The model as JSON values.

    Raises:
        MeasurementError: it raised, or came to no result.
    """
    job: dict[str, JsonValue] = {"task": "call", "function": function, "arguments": list(arguments)}
    if tree is not None:
        job["tree"] = str(tree)
    return _work(
        job,
        device=device,
        timeout=timeout,
        stop=stop,
        cold_cache=True,
        confinement=confinement,
    )


def check_import(
    tree: Path, *, timeout: float = 120.0, confinement: Confinement | None = None
) -> float:
    """Import the layer and the operator of `tree` in a fresh process without a GPU.

    Returns:
        Seconds that it took, without torch, which was there.

    Raises:
        MeasurementError: they cannot be imported, of kind `import` where a module is missing.
    """
    tree = tree.resolve()
    job = _tree_job("import", tree, 1)
    body = _work(job, device="cpu", timeout=timeout, confinement=confinement)
    return float(str(body["import_seconds"]))


def check(
    tree: Path,
    length: int,
    *,
    device: str = "auto",
    timeout: float = WORKLOAD.timeout_seconds,
    stop: threading.Event | None = None,
    cold_cache: bool = False,
    confinement: Confinement | None = None,
) -> GateResult:
    """Run the correctness gate on `tree` in a fresh process and return what it found, red or green.

    Raises:
        MeasurementError: the gate itself did not come to an end.
    """
    tree = tree.resolve()
    job = _tree_job("gate", tree, length)
    body = _work(
        job,
        device=device,
        timeout=timeout,
        stop=stop,
        cold_cache=cold_cache,
        confinement=confinement,
    )
    return _parsed(GateResult, body)


def measure(
    tree: Path,
    length: int,
    *,
    device: str = "auto",
    gate: Gate = True,
    timeout: float = WORKLOAD.timeout_seconds,
    stop: threading.Event | None = None,
    cold_cache: bool = False,
    turn: Path | None = None,
    confinement: Confinement | None = None,
    proven: bool = False,
) -> Measurement:
    """Run the validator's loop on `tree` at `length` tokens in a fresh process.

    The gate runs first, in a process of its own, so that the timed process meets the code as a
    validator's does: nothing compiled, tuned or allocated before its first call.

    Args:
        tree: root of a fork, the folder that holds `fla/`.
        device: `cuda`, `cpu` or `auto` (as the validator chooses).
        gate: True checks the code first; a green result of `check` for the same code and a
            length at least this long is taken instead; False measures unchecked code. A call
            is asked for the result of a check that runs meanwhile, once the loop has run: with
            it goes a `turn` that is held until the check is green.
        timeout: seconds for each process, everything included.
        stop: when set, the child is ended promptly.
        cold_cache: start with empty kernel caches, as on a machine that never ran this code.
        turn: a file; calls at once that share it import side by side, and are timed one after
            another, when all of them have imported. Waiting does not count as their seconds.
        confinement: what shuts the processes in; None runs them with this user's rights.
        proven: take the speed by the worker's own clock in place of the loop, for code of strangers
            (docs/honesty.md); not together with `turn`.

    Raises:
        MeasurementError: no measurement, and why.
    """
    tree = tree.resolve()
    job = _tree_job("prove" if proven else "time", tree, length)
    run: dict[str, Any] = {
        "device": device,
        "timeout": timeout,
        "stop": stop,
        "cold_cache": cold_cache,
        "confinement": confinement,
    }
    if gate is True:
        gate = check(tree, length, **run)
    if isinstance(gate, GateResult):
        _require_green(gate, str(job["source_digest"]), length)
    job["checked"] = gate is not False
    job["turn"] = None if turn is None else str(turn.resolve())
    if turn is not None:
        job["seconds"] = timeout
        run["timeout"] = PATIENCE * timeout
    body = _work(job, **run)
    if callable(gate):
        gate = gate()
        _require_green(gate, str(job["source_digest"]), length)
    cache = "cold" if cold_cache else "shared"
    return _parsed(Measurement, {**body, "gate": gate or None, "cache": cache})


def _parsed(model: type[Model], body: Mapping[str, object]) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise MeasurementError("the worker's result is malformed", "protocol") from error


def _require_green(gate: GateResult, digest: str, length: int) -> None:
    if gate.source_digest != digest:
        raise MeasurementError("the code changed after its gate", "gate", gate=gate)
    if gate.longest < min(length, ORACLE_LENGTH):
        raise MeasurementError(f"its gate stopped at {gate.longest} tokens", "gate", gate=gate)
    if not gate.passed:
        failed = "; ".join(str(c) for c in gate.failed[:3])
        raise MeasurementError(f"wrong results: {failed}", "gate", gate=gate)
