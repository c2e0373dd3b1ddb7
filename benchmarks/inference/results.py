"""What a run of speed.py says, as schema-checked models."""

from __future__ import annotations

from pydantic import Field

from benchmarks.results import Frozen, Positive, Run


class Row(Frozen):
    """One way to decode one prompt."""

    way: str
    tokens_per_sec: Positive = Field(description="of a whole request, the prompt's pass included")
    first_token_ms: Positive = Field(description="of a request for one token")


class InferenceRun(Run):
    """One model decoded in every way; rows come as they are measured."""

    protocol: str
    size: str
    parameters: int
    dtype: str
    transformers: str
    prompt: int = Field(description="tokens")
    new: int = Field(description="tokens that are decoded")
    compile_seconds: float | None = Field(
        None, description="the server's compilation; None where nothing is compiled"
    )
    rows: tuple[Row, ...]
