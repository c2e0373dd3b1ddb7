"""Divides GPUs, cores and memory among evaluations that run at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from neurons.runtime.observe import get_logger
from neurons.validator.devices import Gpu
from neurons.validator.evaluate import Evaluator
from neurons.validator.sandbox import Sandbox

CORES_EACH, BYTES_EACH = 2, 8 * 2**30
"""Minimum cores and bytes of an evaluation, which has two processes that load torch and CUDA."""

log = get_logger("validator")


def evaluators_for(evaluator: Evaluator, gpus: Sequence[Gpu]) -> list[Evaluator]:
    """Return evaluators that may run at the same time, each with its own GPU, all of one model.

    Without a sandbox there is only one, because nothing would separate the forks.
    """
    sandbox = evaluator.confinement
    if not isinstance(sandbox, Sandbox) or len(gpus) < 2:
        return [evaluator]
    alike = [gpu for gpu in gpus if gpu.model == gpus[0].model]
    if others := [f"{gpu.name}: {gpu.model}" for gpu in gpus if gpu not in alike]:
        log.warning("GPUs of other models stay unused", used=gpus[0].model, unused=others)
    room = min(len(sandbox.cores) // CORES_EACH, sandbox.memory_bytes // BYTES_EACH)
    count = min(len(alike), max(1, room))
    if count < len(alike):
        log.warning(
            "too few cores or too little memory to use every GPU at the same time",
            gpus=len(alike),
            evaluations=count,
            cores=f"{len(sandbox.cores)} for forks, each needs {CORES_EACH}",
            memory=f"{sandbox.memory_bytes / 2**30:.0f} GiB for forks, "
            f"each needs {BYTES_EACH // 2**30}",
        )
    if count < 2:
        return [evaluator]
    used = alike[:count]
    log.info(
        "submissions are judged at the same time", gpus={gpu.name: gpu.visible for gpu in used}
    )
    return [
        replace(evaluator, confinement=replace(sandbox, gpu=gpu), share=share, gpu=gpu.name)
        for gpu, share in zip(used, divide(sandbox, used), strict=True)
    ]


def divide(sandbox: Sandbox, gpus: Sequence[Gpu]) -> list[Sandbox]:
    """Return a sandbox for each GPU, with its own cores and its part of the memory."""
    cores, each = sorted(sandbox.cores), len(sandbox.cores) // len(gpus)
    memory = sandbox.memory_bytes // len(gpus)
    return [
        replace(
            sandbox,
            gpu=gpu,
            memory_bytes=memory,
            cores=frozenset(cores[number * each : (number + 1) * each]),
        )
        for number, gpu in enumerate(gpus)
    ]
