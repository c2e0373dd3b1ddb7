"""What profile_layer.py and check_layer.py found, as schema-checked models."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from harness.report import Environment

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Run(_Frozen):
    schema_version: Literal[1] = 1
    created: date
    commit: str | None
    environment: Environment


class Launch(_Frozen):
    """One kernel or copy of a call."""

    kernel: str = Field(description="its name in the profile, cut after 300 characters")
    ms: Positive = Field(description="median over the profiled calls")


class Profile(_Run):
    """Where the time of a call goes, in the validator's loop."""

    tree: str = Field(description="which of benchmark_fork.py's trees")
    tokens: int
    calls: int = Field(description="profiled calls, after the timed ones")
    call_ms: Positive = Field(description="one call of the validator's loop, not profiled")
    copy_gb_per_s: Positive = Field(description="device copy of 1 GiB, both directions counted")
    product_tflops: Positive = Field(description="bf16 product of 8192 x 8192 matrices")
    launches: tuple[Launch, ...] = Field(description="in the order of their start")


class OutputError(_Frozen):
    """An output under bf16 autocast against the float64 layer."""

    tokens: int
    relative_rms: NotNegative
    worst_eighth: NotNegative = Field(description="the largest over eight equal parts of T")
    cosine: float
    max_difference: NotNegative
    reruns_equal: bool = Field(description="three calls gave the same bits")


class GradientErrors(_Frozen):
    """Relative RMS errors of the gradients of x and of every parameter, by name."""

    tokens: int
    errors: dict[str, NotNegative]


class Decoding(_Frozen):
    """A prefill, then one token at a time from the cache; relative RMS errors of the latter."""

    prefill: int
    decoded: int
    error: NotNegative = Field(description="of the decoded tokens against float64")
    error_of_one_call: NotNegative = Field(description="of the same tokens, all in one call")
    apart: NotNegative = Field(description="decoded tokens against those of the one call")


class Exchange(_Frozen):
    """State dictionaries loaded strictly both ways; relative RMS errors against float64."""

    tokens: int
    ours_in_public: NotNegative = Field(description="the fork's own layer with our weights")
    public_in_ours: NotNegative = Field(description="our layer with the fork's initial weights")


class LongRun(_Frozen):
    """A sequence of many tokens."""

    tokens: int
    how: Literal["training", "no_grad", "slices"]
    tokens_per_sec: Positive
    peak_bytes: int = Field(description="max_memory_allocated, input and outputs included")
    slices_apart: NotNegative | None = Field(
        default=None, description="relative RMS between the one call and slices of a million"
    )


class Accuracy(_Run):
    """What the layer computes, on one GPU."""

    outputs: tuple[OutputError, ...]
    gradients: tuple[GradientErrors, ...]
    decoding: Decoding
    exchange: Exchange
    long_runs: tuple[LongRun, ...]


Results = TypeVar("Results", Profile, Accuracy)


def load(kind: type[Results], path: Path) -> Results:
    """Read a file back.

    Raises:
        OSError, pydantic.ValidationError: it is missing, or of another schema.
    """
    return kind.model_validate_json(path.read_text(encoding="utf-8"))


def write(path: Path, results: Profile | Accuracy) -> None:
    """Write a file that `load` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.model_dump_json(indent=1) + "\n", encoding="utf-8")
