"""What is measured, by name: the mechanism, who computes it, and how its cost grows; no torch."""

from __future__ import annotations

from typing import NamedTuple

OURS, HOST, SEQUENTIAL = "quasar_kernels", "fla-core", "torch, token by token"
SEQUENTIAL_TOKENS = 1024
"""Longest call of what launches several operations a token."""

MACHINE = "machine"
"""The first turn: what this GPU is, how fast it copies and multiplies."""


class Entry(NamedTuple):
    """One row of the table before it is measured."""

    mechanism: str
    by: str  # whose implementation
    power: int = 1  # of the tokens that its time grows with
    shares: int = 1  # processes that compile it: a library's autotuner has many variants
    longest: int | None = None  # tokens of a call; None: all lengths are measured


ENTRIES = {
    "softmax": Entry("softmax attention", "torch", power=2),
    "quasar": Entry("Quasar", OURS),
    "delta": Entry("delta rule", OURS),
    "gated-delta": Entry("gated delta rule", OURS),
    "rwkv6": Entry("RWKV-6", OURS),
    "mamba2": Entry("Mamba-2", OURS),
    "mamba2-ssm": Entry("Mamba-2", "mamba_ssm"),
    "mamba2-fla": Entry("Mamba-2", HOST, shares=3),
    "quasar-torch": Entry("Quasar", SEQUENTIAL, longest=SEQUENTIAL_TOKENS),
    "rwkv6-torch": Entry("RWKV-6", SEQUENTIAL, longest=SEQUENTIAL_TOKENS),
    "mamba2-torch": Entry("Mamba-2", SEQUENTIAL, longest=SEQUENTIAL_TOKENS),
    "block": Entry("hybrid block", OURS),
    "model": Entry("hybrid model", OURS),
    "delta-fla": Entry("delta rule", HOST, shares=2),
    "gated-delta-fla": Entry("gated delta rule", HOST, shares=2),
    "kda": Entry("KDA", HOST, shares=3),
    "gla": Entry("GLA", HOST, shares=3),
    "rwkv6-fla": Entry("RWKV-6", HOST, shares=3),
    "rwkv7": Entry("RWKV-7", HOST, shares=3),
}
"""By the name that the command line takes, in the order in which they are measured."""
