"""Runs workers, which describe the machine, check a tree, and time it."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from harness.hardware.machine import Environment
from harness.measuring.environment import PROJECT as PROJECT
from harness.measuring.environment import Options as Options
from harness.measuring.environment import child_environment as child_environment
from harness.measuring.errors import MeasurementError as MeasurementError
from harness.measuring.errors import import_remedy, not_started, without_result
from harness.measuring.job import Job, Reply
from harness.measuring.process import RESULT_LIMIT, Ended, run_supervised, scratch_folder
from harness.sample import Correctness, Kind, Sample
from harness.source import compiled_without_source, missing_files, source_digest
from harness.workload import ORACLE_LENGTH

_OWN_CODE = (PROJECT / "harness", PROJECT / "quasar_kernels")
"""Folders of this project that a worker reads."""

QUICK_SECONDS = 120.0
"""Time limit of a worker that computes nothing."""

PATIENCE = 20
"""Hard timeout of a worker that queues for the GPU lock, as a multiple of its time limit."""

DEFAULT = Options()

Model = TypeVar("Model", bound=BaseModel)

Measure = Callable[..., Sample]
"""`measure`, or a fake."""

CheckTree = Callable[..., Correctness]
"""`check`, or a fake."""


def probe(options: Options = DEFAULT) -> Environment:
    """Return the machine as a worker sees it; raise a MeasurementError without torch or device."""
    quick = replace(options, timeout=min(options.timeout, QUICK_SECONDS))
    return Environment.model_validate(_work({"task": "probe"}, quick))


def call(
    function: str, *arguments: JsonValue, options: Options, tree: Path | None = None
) -> dict[str, JsonValue]:
    """Call a function of this project in a fresh process with empty caches of compiled kernels.

    Raises a MeasurementError if the function raised, or returned no result.

    Args:
        function: `module:name`; it returns a pydantic model, of which this returns the JSON values.
        tree: a folder that the function reads, which a confinement then exposes.
    """
    job: dict[str, JsonValue] = {"task": "call", "function": function, "arguments": list(arguments)}
    if tree is not None:
        job["tree"] = str(tree)
    return _work(job, options, cold_cache=True)


def check_import(tree: Path, options: Options = DEFAULT) -> float:
    """Import the layer and the operator of `tree` in a fresh process without a GPU.

    Returns the seconds of the import. Raises a MeasurementError, of the kind `import` if a module
    is missing.
    """
    quick = replace(options, device="cpu", timeout=min(options.timeout, QUICK_SECONDS))
    return float(str(_work(_tree_job("import", tree.resolve(), 1), quick)["import_seconds"]))


def check(tree: Path, length: int, options: Options = DEFAULT) -> Correctness:
    """Run the correctness check in a fresh process; raise a MeasurementError if it fails to end."""
    job = {**_tree_job("check", tree.resolve(), length), "own": options.own}
    return _parsed(Correctness, _work(job, options))


def measure(
    tree: Path,
    length: int,
    options: Options = DEFAULT,
    *,
    cross_check: bool = True,
    proven: bool = False,
    cold_cache: bool = False,
    gpu_lock: Path | None = None,
) -> Sample:
    """Run the validator's loop on `tree` at `length` tokens in a fresh process.

    The correctness check is another process (`check`), so that the timed one starts like a
    validator's. `confirm` adds its result to the sample. Raises a MeasurementError if there is no
    sample.

    Args:
        tree: root of a fork, the folder that holds `fla/`.
        cross_check: also time a chain of calls after the loop, and reject the sample if the loop
            was much faster than the chain (`proof.RATIO`).
        proven: measure by the referee's clock instead of the loop, for untrusted code
            (docs/honesty.md); cannot be combined with `gpu_lock`.
        cold_cache: start with empty kernel caches.
        gpu_lock: a file; processes that share it import at the same time, and are timed one after
            another. Waiting for it does not count as their seconds.
    """
    job = _tree_job("prove" if proven else "time", tree.resolve(), length)
    job |= {"cross_check": cross_check, "cache": "cold" if cold_cache else "shared"}
    if gpu_lock is not None:
        job |= {"gpu_lock": str(gpu_lock.resolve()), "seconds": options.timeout}
    patience = 1 if gpu_lock is None else PATIENCE
    return _parsed(Sample, _work(job, options, cold_cache=cold_cache, patience=patience))


def require_passed(correctness: Correctness) -> Correctness:
    """Return a correctness check that passed; raise a MeasurementError otherwise."""
    if not correctness.passed:
        failed = "; ".join(str(check) for check in correctness.failed[:3])
        raise MeasurementError(f"wrong results: {failed}", "gate", correctness=correctness)
    return correctness


def confirm(sample: Sample, correctness: Correctness) -> Sample:
    """Return the sample with the correctness check that covers it.

    Raises a MeasurementError if the check failed, or is of other code or of shorter sequences.
    """
    require_passed(correctness)
    if correctness.source_digest != sample.source_digest:
        reason = "the code changed after its correctness check"
        raise MeasurementError(reason, "gate", correctness=correctness)
    if not covers(correctness, sample.length):
        reason = f"its correctness check stopped at {correctness.longest} tokens"
        raise MeasurementError(reason, "gate", correctness=correctness)
    return sample.model_copy(update={"correctness": correctness})


def covers(correctness: Correctness, length: int) -> bool:
    """Return whether a check compared sequences of `length`, or of the longest required length."""
    return correctness.longest >= min(length, ORACLE_LENGTH)


def _tree_job(task: str, tree: Path, length: int) -> dict[str, JsonValue]:
    missing = missing_files(tree)
    if missing:
        raise MeasurementError(
            f"{tree} has no {missing[0]}; name the root of a fork that holds it", "protocol"
        )
    if compiled := compiled_without_source(tree):
        reason = f"fla/{compiled[0]} is compiled, so it cannot be checked"
        raise MeasurementError(reason, "gate", remedy="Publish its source instead.")
    digest = source_digest(tree)
    return {"task": task, "tree": str(tree), "length": length, "source_digest": digest}


def _work(
    job: Mapping[str, JsonValue],
    options: Options,
    *,
    cold_cache: bool = False,
    patience: float = 1.0,
) -> dict[str, JsonValue]:
    """Run a job, fields of a `Job`, in a worker and return the body of its reply.

    The process is killed after `patience` times the options' seconds. Raises a MeasurementError if
    no result can be trusted.
    """
    nonce = secrets.token_hex(16)
    confinement = options.confinement
    parent = confinement.parent if confinement else os.getpid()

    def message(result_fd: int) -> bytes:
        own = {"device": options.device, "result_fd": result_fd, "nonce": nonce, "parent": parent}
        return Job.model_validate({**job, **own}).model_dump_json().encode()

    with scratch_folder("worker-") as folder:
        cache = folder if cold_cache else None
        env = child_environment(os.environ, device=options.device, gpu=options.gpu, cache=cache)
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
            raise not_started(argv[0], error) from error
    return read_reply(ended, nonce, options.timeout)


def read_reply(ended: Ended, nonce: str, timeout: float) -> dict[str, JsonValue]:
    """Return the body of a worker's reply; raise a MeasurementError if it is not trusted."""

    def failure(reason: str, kind: Kind, remedy: str = "") -> MeasurementError:
        return MeasurementError(reason, kind, ended.log_tail, remedy=remedy)

    if ended.stopped:
        raise failure("stopped on request", "stopped")
    # the worker's `GpuLock` sends SIGALRM when its time is up
    if ended.timed_out or ended.returncode == -signal.SIGALRM:
        raise failure(f"not done within {timeout:g} s", "timeout")
    if ended.exceeded:
        raise failure(ended.exceeded, "limit")
    if not ended.result:
        raise failure(*without_result(ended.returncode))
    if len(ended.result) > RESULT_LIMIT or ended.result.count(b"\n") != 1:
        raise failure("the worker did not send exactly one result", "protocol")
    try:
        reply = Reply.model_validate_json(ended.result)
    except ValidationError as error:
        raise failure("the worker's result is malformed", "protocol") from error
    if not secrets.compare_digest(reply.nonce.encode(), nonce.encode()):
        raise failure("the result did not come from the worker", "protocol")
    if reply.failure is not None:
        remedy = import_remedy(reply.reason) if reply.failure == "import" else ""
        raise failure(reply.reason, reply.failure, remedy)
    if reply.body is None:
        raise failure("the worker's result is empty", "protocol")
    return reply.body


def _parsed(model: type[Model], body: Mapping[str, object]) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise MeasurementError("the worker's result is malformed", "protocol") from error
