"""The targets that the miner tries to measure, in order."""

from __future__ import annotations

from harness.hardware.gpus import best_target, fits
from harness.hardware.machine import Environment
from harness.workload import CPU_LIMIT, LENGTHS, lengths_for
from neurons.runtime.errors import Held
from neurons.runtime.settings import Settings
from neurons.wire.rules import LEAGUES
from quasar_kernels.memory import is_fused, peak_bytes

LOWEST_LEAGUE = 100_000
"""Longest target that `auto` tries in the lowest league."""


def targets_to_try(target: int | None, device: str) -> tuple[int, ...]:
    """Return the targets to try, in order: the first that can be measured is claimed.

    `auto` (None) starts with the longest. Among long targets the speed hardly changes, so the
    league's multiplier decides; among short ones, longer targets are faster. Raises Held if the
    target is too long for a CPU.
    """
    if target is None and device == "cuda":
        leagues = [least for least, _, _ in LEAGUES if least > LENGTHS[0]]
        return tuple(sorted({*leagues, *(n for n in LENGTHS if n <= LOWEST_LEAGUE)}, reverse=True))
    if target is None:
        return tuple(sorted(lengths_for(CPU_LIMIT, device), reverse=True))
    if target not in lengths_for(target, device):
        raise Held(
            f"TARGET_SEQUENCE_LENGTH={target} cannot be measured on a CPU, and the miner claims "
            "only measured lengths.",
            f"Use a machine with an NVIDIA GPU, or set TARGET_SEQUENCE_LENGTH to {CPU_LIMIT} for "
            "a trial.",
        )
    return (target,)


def targets_here(
    target: int | None, environment: Environment, settings: Settings
) -> tuple[int, ...]:
    """Return the `targets_to_try` that fit into the GPU's memory by a computed estimate.

    If none fits with a margin, it returns those that fit without one. The estimate is for the
    published layer; with other code (FORK_SCOPE=ops, REPO_PATH) or an unknown memory it returns all
    targets. Raises Held if none can fit.
    """
    targets = targets_to_try(target, environment.device)
    gpu, memory_mb = environment.gpu, environment.gpu_memory_mb
    if gpu is None or memory_mb is None:
        return targets
    memory_gib, capability = memory_mb / 1024, environment.compute_capability
    if settings.fork_scope == "ops" or settings.repo_path is not None:
        return targets
    needed = {n: peak_bytes(n, fused=is_fused(capability)) / 2**30 for n in targets}
    fitting = tuple(n for n in targets if fits(n, memory_gib, capability))
    possible = fitting or tuple(n for n in targets if needed[n] <= memory_gib)
    if possible:
        return possible
    best = best_target(memory_gib, capability)
    raise Held(
        f"TARGET_SEQUENCE_LENGTH={settings.target_sequence_length} is too long for {gpu}: "
        f"{min(targets):,} tokens need {needed[min(targets)]:.1f} GiB of its {memory_gib:.1f} GiB.",
        f"Set TARGET_SEQUENCE_LENGTH to {best} or less, or to auto, or use a GPU with more memory."
        if best
        else "Use a GPU or a MIG slice with more memory.",
    )
