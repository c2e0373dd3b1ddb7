"""The messages between an inference server and a validator that compares logits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from neurons.wire.protocol import Rows

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class InferenceRequest(BaseModel):
    """Body of POST /inference; `logits_at_step` counts the new tokens from 1."""

    model_config = ConfigDict(extra="ignore")

    prompt: Annotated[list[TokenId], Field(min_length=1)]
    gen_len: Annotated[int, Field(ge=1)]
    logits_at_step: Annotated[int, Field(ge=1)] | None = None


class InferenceReply(BaseModel):
    """Reply of POST /inference: logits before any softmax, one for each token of the vocabulary."""

    tokens: Rows[int]
    captured_logits: Rows[float] | None = None
    elapsed_sec: float


class Health(BaseModel):
    """Reply of GET /health; status is `healthy`, `loading` or `failed`."""

    model_config = ConfigDict(protected_namespaces=())

    status: str
    model_name: str
    device: str


class ModelInfo(BaseModel):
    """Reply of GET /model_info."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    device: str
    vocab_size: int
    max_prompt_tokens: int
    max_new_tokens: int
