"""What a run of speed.py says, as schema-checked models; no torch, as processes pass them on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from benchmarks.results import Frozen, Positive, Run

Way = Literal["forward", "forward and backward", "decoding"]
Clock = Literal["graph", "events", "host"]
"""What timed: replays of a CUDA graph, CUDA events around calls in a row, or the host's clock."""

ERROR = 0.1
"""Relative RMS error from which on an implementation is wrong, and not timed."""


class Row(Frozen):
    """One call that was compared with float64 and timed."""

    name: str = Field(description="as names.py has it")
    way: Way
    batch: int
    tokens: int = Field(description="of a sequence, or of all where they are packed")
    packed: bool = Field(False, description="sequences of mixed lengths in one row")
    ms: Positive
    clock: Clock
    in_a_row_ms: Positive | None = Field(
        None, description="as packed calls are timed, without a graph; at their length alone"
    )
    peak_bytes: int = Field(
        description="most that was allocated during a call, its inputs included"
    )
    moved_bytes: int = Field(description="inputs and state read once, results written once")
    operations: float = Field(0, description="of products that no implementation saves; 0: few")
    errors: dict[str, float] = Field(description="relative RMS against float64, by tensor")

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences in a second."""
        return self.batch * self.tokens / self.ms * 1e3


class Missing(Frozen):
    """What was to be measured and was not, and why."""

    name: str
    reason: str
    way: Way | None = Field(None, description="None: all that is not among the rows")
    tokens: int | None = None
    packed: bool = False


class Trained(Frozen):
    """Training steps of the small language model by one setting."""

    setting: str
    parameters: int
    batch: int
    tokens: int
    step_ms: Positive
    peak_bytes: int
    loss: Positive = Field(description="after the last step, nats a token")
    busy: float = Field(0, description="share of a step in which the GPU works; 0: none is there")
    backends: dict[str, str] = Field(description="what computes each branch")

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a batch in a second."""
        return self.batch * self.tokens / self.step_ms * 1e3


class Rates(Frozen):
    """What the GPU reaches, measured in the same run."""

    copy_gb_per_s: Positive = Field(description="device copy of 1 GiB, both directions counted")
    product_tflops: Positive = Field(description="product of two bf16 matrices of 8,192 x 8,192")


class MechanismsResults(Run):
    """A whole run on one GPU; files are written after every row."""

    protocol: str
    versions: dict[str, str] = Field(description="of the packages whose implementations ran")
    limit_seconds: float
    variants: int = Field(description="most of each of the host's kernels that were tried; 0: all")
    seconds: float = Field(description="that it had taken when this was written")
    rates: Rates
    rows: tuple[Row, ...] = ()
    trained: tuple[Trained, ...] = ()
    missing: tuple[Missing, ...] = ()


def bound_ms(row: Row, rates: Rates) -> float:
    """Return the least time of a call: its bytes at a copy's speed, its products at a product's."""
    by_memory = row.moved_bytes / rates.copy_gb_per_s / 1e6
    return max(by_memory, row.operations / rates.product_tflops / 1e9)
