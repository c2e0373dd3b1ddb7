"""The verdict on a speed and on logits, at and around the limits."""

import math
from typing import Any

import pytest

from neurons.runtime.errors import Postponed
from neurons.validator import logits as module
from neurons.validator.logits import LogitVerifier
from neurons.validator.verdict import judge, refute, reject
from neurons.wire.inference_protocol import InferenceReply, InferenceRequest, ModelInfo
from neurons.wire.protocol import QueuedSubmission, Verification


@pytest.mark.parametrize(
    ("claim", "actual", "score"),
    [
        *((1000.0, 1250.0, 1.25), (1000.0, 900.0, 0.9), (1000.0, 899.9, 0.0)),
        *((1000.0, actual, 0.0) for actual in (0.0, math.nan, math.inf)),
        *((claim, 1000.0, 0.0) for claim in (0.0, -1.0, math.nan, math.inf, None)),
        (0.5, 1.0, 2.0),  # slow, but a speed
    ],
)
def test_judge(claim: float | None, actual: float, score: float) -> None:
    verdict = judge(claim, actual)
    assert verdict.score == pytest.approx(score)
    assert verdict.passed == (score > 0)


def test_a_reason_stays_on_one_printable_line() -> None:
    """It may name a fork's files, and is shown on terminals and pages."""
    reason = reject("a.so\nPASSED: \x1b[32m\u202egood\x9b").reason
    assert reason == "a.so PASSED: \N{REPLACEMENT CHARACTER}[32m\ufffdgood\ufffd"


def test_a_failed_logit_verification_replaces_the_reason() -> None:
    confirmed = judge(100.0, 95.0)
    refuted = refute(confirmed)
    assert "Confirmed" not in refuted.reason
    assert "95.0 tokens/s measured, 100.0 claimed" in refuted.reason
    assert refuted.score == confirmed.score  # the API excludes it by its verification


# ---- logits: replies with numbers that a faulty or hostile server may send ----------------------

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
