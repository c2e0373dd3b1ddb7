"""Logit verifications of replies with numbers that a faulty or hostile server may send."""

from __future__ import annotations

import math
from typing import Any

import pytest

from neurons.runtime.errors import Postponed
from neurons.validator import logits as module
from neurons.validator.logits import LogitVerifier
from neurons.wire.inference_protocol import InferenceReply, InferenceRequest, ModelInfo
from neurons.wire.protocol import QueuedSubmission, Verification

SUBMISSION = QueuedSubmission(id=7, miner_hotkey="5", target_sequence_length=1, created_at="2026")
REQUEST = InferenceRequest(prompt=[1], gen_len=1, logits_at_step=1)
EXPECTED = [1.0, 2.0]


def verify(logits: list[float], seconds: float = 1.0) -> Verification:
    expected, reply = (
        InferenceReply(tokens=[1], captured_logits=values, elapsed_sec=seconds)
        for values in (EXPECTED, logits)
    )
    return LogitVerifier("", {})._judge(SUBMISSION, REQUEST, expected, reply)


@pytest.mark.parametrize(
    "logits",
    [[1.3e154, 1.3e154], [-1.7e308, 1.7e308], [-math.inf, math.inf], [1.0, math.nan], [0.0, 0.0]],
)
def test_logits_without_a_cosine_fail(logits: list[float]) -> None:
    result = verify(logits)
    assert (result.verified, result.cosine_similarity, result.max_abs_diff) == (False, -1.0, 1e9)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_any_duration_that_a_server_reports_gives_a_finite_throughput(seconds: float) -> None:
    result = verify(EXPECTED, seconds)
    assert result.verified
    assert result.throughput is not None
    assert math.isfinite(result.throughput)


def test_a_reference_server_without_logits_counts_against_no_miner(monkeypatch) -> None:
    figures = {"vocab_size": 9, "max_prompt_tokens": 999, "max_new_tokens": 999}
    replies: dict[type, Any] = {
        ModelInfo: ModelInfo(model_name="", device="", **figures),
        InferenceReply: InferenceReply(tokens=[1] * 8, elapsed_sec=1.0),
    }
    monkeypatch.setattr(module, "_read", lambda *values: replies[values[3]])
    verifier = LogitVerifier("http://own", {"5": "http://miner"}, new_tokens=8)
    with pytest.raises(Postponed, match="validator's own inference server gave no logits"):
        verifier.verify(SUBMISSION)
