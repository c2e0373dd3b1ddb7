"""The wire and the subnet's rules against manual values, and limits against hostile values."""

import hashlib
import math
from typing import Any

import pytest
from pydantic import ValidationError

from neurons.wire import protocol, rules

CLAIM = {"fork_url": "https://host/fork", "commit_hash": "0" * 40, "tokens_per_sec": 1.5}
IDS = {"submission_id": 1, "miner_hotkey": "5Grw"}
REVEAL: dict[str, Any] = {**IDS, **CLAIM, "commitment_salt": "00", "signature": "00"}


def test_commitment_hashes_the_text_of_salt_and_url() -> None:
    expected = hashlib.sha256(b"abchttps://host/fork").hexdigest()
    assert protocol.commitment_hash("abc", "https://host/fork") == expected
    assert protocol.commitment_hash("abc", "https://host/fork/") != expected


def test_the_signed_text_matches_the_reference_miner() -> None:
    figures = {"512": {"vram_mb": 2.0, "tokens_per_sec": 10.5}}
    text = protocol.submission_text("url", "hash", 1000.0, figures, "repo")
    assert text == 'urlhash1000.0{"512": {"tokens_per_sec": 10.5, "vram_mb": 2.0}}repo'
    assert protocol.submission_text("url", "hash", 2.5, None) == "urlhash2.5{}"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_sec": math.nan},
        {"tokens_per_sec": 0},
        {"benchmarks": {"512": {"tokens_per_sec": math.nan}}},
        {"benchmarks": {"512": {"tokens_per_sec": 1e13}}},
        {"benchmarks": {"0512": {"tokens_per_sec": 1.0}}},
        {"benchmarks": {"512": {f"figure {n}": 1.0 for n in range(9)}}},
        {"benchmarks": {str(n): {} for n in range(1, 34)}},
        {"commit_hash": "HEAD"},
        {"commit_hash": "A" * 40},
        {"fork_url": "https://host/\0"},
        {"commitment_salt": "\ud800"},
        {"submission_id": 2**31},
    ],
)
def test_a_reveal_rejects_invalid_values(change: dict[str, Any]) -> None:
    protocol.RevealRequest(**REVEAL)
    with pytest.raises(ValidationError):
        protocol.RevealRequest(**{**REVEAL, **change})


def test_a_pending_reveal_is_identified_by_hotkey_and_prefix() -> None:
    digest = protocol.commitment_hash("salt", "url")
    blocks = {"reveal_block": 1, "blocks_remaining": 0, "can_reveal": True, "created_at": ""}
    row = protocol.PendingReveal(**IDS, commitment_hash=f"{digest[:16]}...", **blocks)
    assert row.is_of("5Grw", digest)
    assert not row.is_of("other", digest)
    assert not row.is_of("5Grw", protocol.commitment_hash("other", "url"))
    fields = row.model_dump()
    for shown in (digest.upper(), f"0x{digest[:16]}", f"{digest[:10].upper()}\u2026", digest):
        assert protocol.PendingReveal(**{**fields, "commitment_hash": shown}).is_of("5Grw", digest)
    for shown in ("...", f"{digest[:7]}...", ""):
        other = protocol.PendingReveal(**{**fields, "commitment_hash": shown})
        assert not other.is_of("5Grw", digest)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *((f"2026-01-05{sep}00:00:00{end}", 1767571200.0) for sep in "T " for end in ("", "Z")),
        ("2026-01-05T02:00:00+02:00", 1767571200.0),
        ("2026-01-05T00:00:00.25-00:00", 1767571200.25),
        ("2026-01-05T00:00:00.2500001234", 1767571200.25),
        *((text, 0.0) for text in ("", "Monday", "nan", "inf", "9" * 400, "0001-01-01T00:00:00Z")),
    ],
)
def test_a_moment_is_read_in_every_spelling(text: str, seconds: float) -> None:
    assert protocol.unix_time(text) == pytest.approx(seconds, abs=1e-3)


def test_a_block_is_twelve_seconds_since_2021() -> None:
    assert (rules.block_at(1_609_459_200.0), rules.block_at(1_609_459_211.9)) == (0, 0)
    assert rules.block_at(1_609_459_212.0) == 1
    assert rules.block_at(1_609_459_212.0, block_seconds=1) == 12
    assert rules.block_at(1_609_459_176.0) == -2  # the clock was never set


@pytest.mark.parametrize(
    ("length", "league"),
    [
        (-1, ("100k", 0.5)),
        (199_999, ("100k", 0.5)),
        (200_000, ("200k", 0.75)),
        (999_999, ("900k", 2.5)),
        (1_000_000, ("1M", 3.0)),
    ],
)
def test_leagues_include_their_lower_bound(length: int, league: tuple[str, float]) -> None:
    assert rules.league_of(length) == league
    assert rules.weighted_score(10.0, length) == 10.0 * league[1]
