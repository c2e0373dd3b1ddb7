"""The wire of the validator API: messages, commitment and signed texts.

Shared by the miner, the validator and the API server, so that one change serves all three.
Times on this wire are naive UTC in ISO form. No number on it may be NaN or infinite.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from neurons.rules import ROUND_HOURS

HOTKEY_HEADER = "Hotkey"
SIGNATURE_HEADER = "Signature"


def commitment_hash(salt: str, fork_url: str) -> str:
    """Return the lower-case SHA-256 hex of the salt's text followed by the URL, to the letter."""
    return hashlib.sha256((salt + fork_url).encode()).hexdigest()


Benchmarks = dict[str, dict[str, float]]
"""Sequence length (as text) to `tokens_per_sec` and `vram_mb` (MiB) measured there."""


def submission_text(
    fork_url: str,
    commit_hash: str,
    tokens_per_sec: float,
    benchmarks: Mapping[str, Mapping[str, float]] | None,
    repo_hash: str | None = None,
) -> str:
    """Return the text that a submission's or a reveal's body `signature` signs."""
    figures = json.dumps(benchmarks or {}, sort_keys=True)
    return f"{fork_url}{commit_hash}{tokens_per_sec}{figures}{repo_hash or ''}"


def _hex(digits: int, meaning: str) -> AfterValidator:
    def checked(value: str) -> str:
        if not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
            raise ValueError(f"must be a {meaning}")
        return value

    return AfterValidator(checked)


def _plain(value: str) -> str:
    if any(ord(character) < 32 for character in value):
        raise ValueError("must not contain control characters")
    return value


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Text = Annotated[str, Field(min_length=1, max_length=2048), AfterValidator(_plain)]
"""A short text; PostgreSQL cannot store NUL, and nothing here needs the other controls."""

Length = Annotated[int, Field(gt=0, le=2**31 - 1)]
"""A sequence length in tokens."""

RowId = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A row of the server's database."""

Block = Annotated[int, Field(ge=0, le=2**53)]
"""A block number, of the server's clock; larger ones would not survive every JSON reader."""

Place = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A rank, 1 for the best."""

CommitHash = Annotated[str, _hex(40, "full lower-case 40-digit commit hash")]
Sha256 = Annotated[str, _hex(64, "lower-case 64-digit SHA-256")]
Shown = Annotated[float | None, AfterValidator(_finite_or_none)]
"""A figure that a server shows; what is not a finite number says nothing."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Mebibytes = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FiniteBenchmarks = Annotated[
    dict[
        Annotated[str, Field(max_length=16)],
        Annotated[dict[Annotated[str, Field(max_length=32)], Mebibytes], Field(max_length=8)],
    ],
    Field(max_length=64),
]
"""`Benchmarks` as a request may carry them: finite, not negative, and few enough to list."""


class Message(BaseModel):
    """Base of every message: unknown fields of a newer server are kept out, not refused."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class RegisterRequest(Message):
    """Body of POST /register_miner."""

    hotkey: Text
    model_name: Text
    league: str


class RegisterReply(Message):
    """Reply of POST /register_miner; status is `registered` or `already_registered`.

    `uid` is this project's own server's addition.
    """

    status: str
    hotkey: str
    model_name: str
    league: str
    uid: int | None = None


class Round(Message):
    """Reply of GET /get_current_round."""

    id: RowId
    round_number: int
    start_time: str
    end_time: str
    status: str
    time_remaining_seconds: int
    baseline_submission_id: int | None = None
    winner_hotkey: str | None = None
    total_submissions: int = 0


class CommitRequest(Message):
    """Body of POST /commit_submission; `signature` signs `commitment_hash`."""

    miner_hotkey: Text
    commitment_hash: Sha256
    target_sequence_length: Length
    signature: Text


class CommitReply(Message):
    """Reply of POST /commit_submission."""

    submission_id: RowId
    commitment_hash: str
    reveal_block: Block
    estimated_reveal_time: str
    message: str = ""


class ClaimRequest(Message):
    """What a reveal and a direct submission say alike; `signature` signs `submission_text(...)`."""

    miner_hotkey: Text
    fork_url: Text
    commit_hash: CommitHash
    tokens_per_sec: Speed
    signature: Text
    vram_mb: Mebibytes | None = None
    benchmarks: FiniteBenchmarks | None = None


class RevealRequest(ClaimRequest):
    """Body of POST /reveal_submission."""

    submission_id: RowId
    commitment_salt: Text
    docker_image: Text | None = None


class RevealReply(Message):
    """Reply of POST /reveal_submission."""

    submission_id: int
    miner_hotkey: str
    fork_url: str
    commit_hash: str
    is_revealed: bool
    message: str = ""


class SubmitRequest(ClaimRequest):
    """Body of POST /submit_kernel, the direct submission without commit and reveal."""

    target_sequence_length: Length
    repo_hash: Text | None = None


class SubmitReply(Message):
    """Reply of POST /submit_kernel; the server repeats what it stored."""

    submission_id: RowId
    created_at: str
    miner_hotkey: str | None = None
    fork_url: str | None = None
    commit_hash: str | None = None
    repo_hash: str | None = None
    target_sequence_length: int | None = None
    tokens_per_sec: float | None = None
    vram_mb: float | None = None
    benchmarks: Benchmarks | None = None


class PendingReveal(Message):
    """One commitment that waits for its reveal; the hash is its first 16 digits and `...`."""

    submission_id: RowId
    miner_hotkey: str
    commitment_hash: str
    reveal_block: Block
    blocks_remaining: int
    can_reveal: bool
    created_at: str

    def is_of(self, hotkey: str, commitment: str) -> bool:
        """Tell whether this row is the commitment `commitment` of `hotkey`."""
        prefix = self.commitment_hash.removesuffix("...")
        return self.miner_hotkey == hotkey and len(prefix) >= 16 and commitment.startswith(prefix)


class PendingReveals(Message):
    """Reply of GET /pending_reveals."""

    current_block: Block
    pending_reveals: Sequence[PendingReveal] = ()

    def row_of(self, hotkey: str, commitment: str) -> PendingReveal | None:
        """Return the row of the commitment `commitment` of `hotkey`, if it is listed."""
        return next((row for row in self.pending_reveals if row.is_of(hotkey, commitment)), None)


class QueuedSubmission(Message):
    """A submission that no validator has marked yet, as GET /get_submission_stats lists it.

    A committed row that is not revealed has no `fork_url`, `commit_hash` and `tokens_per_sec`
    of its own yet.
    """

    id: RowId
    miner_hotkey: str
    fork_url: str | None = None
    commit_hash: str | None = None
    repo_hash: str | None = None
    target_sequence_length: int
    tokens_per_sec: float | None = None
    vram_mb: float | None = None
    benchmarks: Benchmarks | None = None
    validated: bool = False
    is_revealed: bool = True
    ip_address: str | None = None
    created_at: str


class Performer(Message):
    """One row of `top_performers`.

    `validated`, `rank`, `score` and `weighted_score` are this project's own server's additions;
    the public server leaves them out. `rank` is the place in the submission's own round.
    """

    id: RowId
    miner_hotkey: str
    tokens_per_sec: float
    target_sequence_length: int
    created_at: str
    validated: bool | None = None
    rank: Place | None = None
    score: Shown = None
    weighted_score: Shown = None


class SubmissionStats(Message):
    """Reply of GET /get_submission_stats."""

    total_submissions: int
    recent_submissions: Sequence[QueuedSubmission] = ()
    stats: dict[str, Any] = Field(default_factory=dict)
    top_performers: Sequence[Performer] = ()


class Weight(Message):
    """One row of GET /get_weights, best rank first."""

    uid: int
    hotkey: str
    weight: float


class Weights(Message):
    """Reply of GET /get_weights."""

    epoch: int
    weights: Sequence[Weight] = ()


class MarkValidatedRequest(Message):
    """Body of POST /mark_validated; a score of 0 excludes the submission from the ranking.

    The server answers 400, not 422, when `submission_id` is missing.
    """

    submission_id: RowId | None = None
    score: float = Field(ge=0, allow_inf_nan=False)


class Verification(Message):
    """Query of POST /record_verification: the outcome of a logit verification."""

    submission_id: RowId
    verified: bool
    cosine_similarity: Finite | None = None
    max_abs_diff: Finite | None = None
    throughput: Finite | None = None
    reason: Annotated[str | None, Field(max_length=2048)] = None


class FailureRequest(Message):
    """Body of POST /record_failure."""

    ip_address: Text


class CreateRoundRequest(Message):
    """Body of POST /create_round."""

    duration_hours: int = Field(default=ROUND_HOURS, gt=0, le=24 * 366)
    baseline_submission_id: RowId | None = None
