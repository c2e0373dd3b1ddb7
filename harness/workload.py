"""The frozen description of a validator's timed calls, and the sequence lengths to time."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

LENGTHS = (512, 1024, 2048, 4096, 16384, 65536, 100000, 262144, 500000, 1000000)
"""Sequence lengths in tokens that a full report covers."""

VALIDATOR_LENGTHS = (512, 1024, 2048)
"""Lengths that a validator times in addition to the submission's target."""

CPU_LIMIT = 2048
"""Longest sequence timed on a CPU: longer runs take minutes and do not predict a GPU's speed."""

ORACLE_LENGTH = 65536
"""A correctness check compares the operator up to the measured length. If the float64 oracle does
not fit into memory, the check stops at this length instead, but never below it."""


@dataclass(frozen=True)
class Workload:
    """One validator run: a layer with default initialisation, called on fresh fp32 input.

    On CUDA the calls run under bf16 autocast, and autograd records them, but no backward pass
    follows. On a CPU the validator's script runs them in fp32 under `torch.no_grad()`. The layer
    stays in training mode on both.
    """

    batch_size: int = 1
    hidden_size: int = 512
    head_dim: int = 64
    num_heads: int = 8
    mode: str = "chunk"
    use_short_conv: bool = True
    warmup_calls: int = 3
    timed_calls: int = 10
    timeout_seconds: float = 300.0

    def layer_arguments(self) -> dict[str, int | str | bool]:
        """Return the keyword arguments that `QuasarAttention` is built with."""
        return {
            "hidden_size": self.hidden_size,
            "head_dim": self.head_dim,
            "num_heads": self.num_heads,
            "mode": self.mode,
            "use_short_conv": self.use_short_conv,
        }

    def describe(self, device: str) -> str:
        """Return the protocol on `device` (`cuda` or `cpu`) as sentences for a report."""
        mode = (
            "bf16 autocast with gradients recorded, CUDA synchronized before and after"
            if device == "cuda"
            else "fp32 under no_grad on a CPU (short lengths only; they predict no GPU's speed)"
        )
        return (
            f"QuasarAttention({self.hidden_size}, head_dim={self.head_dim}, "
            f"num_heads={self.num_heads}) in training mode on fp32 randn"
            f"({self.batch_size}, T, {self.hidden_size}); {mode}. A fresh process per length: "
            f"{self.warmup_calls} warm-up calls, then {self.timed_calls} timed calls; "
            f"tokens/s = {self.timed_calls} T / elapsed; memory = max_memory_allocated in MiB. "
            f"Import, compilation and all calls within {self.timeout_seconds:.0f} s."
        )


WORKLOAD = Workload()


def parse_lengths(text: str) -> list[int]:
    """Return the lengths in a text such as 512,1024; raise argparse's ArgumentTypeError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths such as 512,1024")
    return [int(part) for part in parts]


def lengths_for(target: int, device: str) -> tuple[int, ...]:
    """Return the lengths to measure for a submission at `target` tokens, shortest first.

    `device` is `cuda` or `cpu`. On both, the result has `VALIDATOR_LENGTHS`. On CUDA it also has
    the target and all `LENGTHS` up to it; on a CPU only a target of at most `CPU_LIMIT` tokens.
    """
    if device == "cpu":
        extra = {target} if target <= CPU_LIMIT else set()
    else:
        extra = {target, *(length for length in LENGTHS if length <= target)}
    return tuple(sorted({*VALIDATOR_LENGTHS, *extra}))
