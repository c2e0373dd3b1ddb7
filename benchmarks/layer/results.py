"""What profile.py and accuracy.py found, as schema-checked models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from benchmarks.results import Frozen, NotNegative, Positive, Run


class Launch(Frozen):
    """One kernel or copy of a call."""

    kernel: str = Field(description="its name in the profile, cut after 300 characters")
    ms: Positive = Field(description="median over the profiled calls")


class LayerProfile(Run):
    """Where the time of a call goes, in the validator's loop."""

    tree: str = Field(description="which of trees.py's")
    tokens: int
    calls: int = Field(description="profiled calls, after the timed ones")
    call_ms: Positive = Field(description="one call of the validator's loop, not profiled")
    copy_gb_per_s: Positive = Field(description="device copy of 1 GiB, both directions counted")
    product_tflops: Positive = Field(description="bf16 product of 8192 x 8192 matrices")
    launches: tuple[Launch, ...] = Field(description="in the order of their start")


class OutputError(Frozen):
    """An output under bf16 autocast against the float64 layer."""

    tokens: int
    relative_rms: NotNegative
    worst_eighth: NotNegative = Field(description="the largest over eight equal parts of T")
    cosine: float
    max_difference: NotNegative
    reruns_equal: bool = Field(description="three calls gave the same bits")


class GradientErrors(Frozen):
    """Relative RMS errors of the gradients of x and of every parameter, by name."""

    tokens: int
    errors: dict[str, NotNegative]


class LayerDecoding(Frozen):
    """A prefill, then one token at a time from the cache; relative RMS errors of the latter."""

    prefill: int
    decoded: int
    error: NotNegative = Field(description="of the decoded tokens against float64")
    error_of_one_call: NotNegative = Field(description="of the same tokens, all in one call")
    apart: NotNegative = Field(description="decoded tokens against those of the one call")


class Exchange(Frozen):
    """State dictionaries loaded strictly both ways; relative RMS errors against float64."""

    tokens: int
    ours_in_public: NotNegative = Field(description="the fork's own layer with our weights")
    public_in_ours: NotNegative = Field(description="our layer with the fork's initial weights")


class LongRun(Frozen):
    """A sequence of many tokens."""

    tokens: int
    how: Literal["training", "no_grad", "slices"]
    tokens_per_sec: Positive
    peak_bytes: int = Field(description="max_memory_allocated, input and outputs included")
    slices_apart: NotNegative | None = Field(
        default=None, description="relative RMS between the one call and slices of a million"
    )


class LayerAccuracy(Run):
    """What the layer computes, on one GPU."""

    outputs: tuple[OutputError, ...]
    gradients: tuple[GradientErrors, ...]
    decoding: LayerDecoding
    exchange: Exchange
    long_runs: tuple[LongRun, ...]
