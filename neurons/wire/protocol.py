"""The wire of the validator API: messages, commitments and signed texts.

The miner, the validator and the API server share this module. Times on the wire are naive UTC in
ISO form. No number on it may be NaN or infinite.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
)

from neurons.wire.rules import MIN_TARGET, ROUND_HOURS, Ranking

HOTKEY_HEADER = "Hotkey"
SIGNATURE_HEADER = "Signature"
TIMESTAMP_HEADER = "Timestamp"
NONCE_HEADER = "Nonce"
"""Only validators send the last two headers; a validator's signature covers `request_text`."""

WIRE_VERSION = 2
"""The version of this project's server: commitments and signatures bind a whole submission. The
public wire is version 1."""

HIGHEST_CLAIM = 1e10
"""The highest claim in tokens/s: 50 times the best speed of an H200."""

MAX_HOURS = 24 * 366
"""The longest round."""

KNOWN_LENGTHS = frozenset(
    {*(2**n for n in range(7, 25)), *range(100_000, 1_000_001, 100_000), 250_000}
)
"""The lengths that the server keeps figures of, in addition to the submission's target."""


def commitment_hash(salt: str, fork_url: str) -> str:
    """Return the SHA-256 in lower-case hex of the salt's text followed by the unchanged URL."""
    return hashlib.sha256((salt + fork_url).encode()).hexdigest()


FIGURES = ("tokens_per_sec", "vram_mb")
LARGEST = 1e12
"""Limit on every figure of a request, so that sums and means of stored figures stay finite."""

WITHDRAWN = "Withdrawn by the organiser"
"""Start of the reason of a verdict that no validator may replace."""

JUDGED = "Submission already judged by"
"""Start of the reply to a second validator, because the first verdict counts."""

Benchmarks = dict[str, dict[str, float]]
"""Sequence length (as text) to `tokens_per_sec` and `vram_mb` (MiB) measured there."""


def submission_text(
    fork_url: str,
    commit_hash: str,
    tokens_per_sec: float,
    benchmarks: Mapping[str, Mapping[str, float]] | None,
    repo_hash: str | None = None,
) -> str:
    """Return the text that the `signature` in a submission or reveal signs in version 1."""
    figures = json.dumps(benchmarks or {}, sort_keys=True)
    return f"{fork_url}{commit_hash}{tokens_per_sec}{figures}{repo_hash or ''}"


def _hex(digits: int, meaning: str) -> AfterValidator:
    def checked(value: str) -> str:
        if not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
            raise ValueError(f"must be a {meaning}")
        return value

    return AfterValidator(checked)


_CONTROL = re.compile(r"[\x00-\x1f\ud800-\udfff]")


def _plain(value: str) -> str:
    if _CONTROL.search(value):
        raise ValueError("must not contain control characters")
    return value


def _printable(value: str | None) -> str | None:
    """Remove unprintable characters from a text that may come from untrusted code."""
    if value is None:
        return None
    return "".join(c for c in value if c == "\n" or c.isprintable())


_Plain = AfterValidator(_plain)  # PostgreSQL cannot store NUL; no field needs a control character

Text = Annotated[str, Field(min_length=1, max_length=128), _Plain]
"""A name, a hotkey or another short text."""

Address = Annotated[str, Field(min_length=1, max_length=512), _Plain]
"""Address of a fork or an image."""

Salt = Annotated[str, Field(min_length=1, max_length=256), _Plain]

SignatureText = Annotated[str, Field(min_length=1, max_length=160), _Plain]
"""A signature in hex, usually of 128 digits."""

Target = Annotated[int, Field(ge=MIN_TARGET, le=2**31 - 1)]
"""A sequence length in tokens that can be submitted."""

RowId = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A row of the server's database."""

Block = Annotated[int, Field(ge=0, le=2**53)]
"""A block number by the server's clock; some JSON parsers round larger integers."""

Place = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A rank, 1 for the best."""


class _FailFast(FailFast):
    __hash__ = object.__hash__  # pydantic's own class cannot be part of a union


Row = TypeVar("Row")
Rows = Annotated[list[Row], _FailFast()]
"""Rows of a reply. Validation ends at the first invalid one: all errors could fill the memory."""

Hex = Annotated[str, AfterValidator(lambda text: text.strip().lower().removeprefix("0x"))]
"""A hash as another server writes it, in the spelling of this project."""

CommitHash = Annotated[str, _hex(40, "full lower-case 40-digit commit hash")]
Sha256 = Annotated[str, _hex(64, "lower-case 64-digit SHA-256")]
Shown = Annotated[
    float | None, AfterValidator(lambda x: None if x is None or not math.isfinite(x) else x)
]
"""A figure that a server shows; None if it is not finite."""

Cosine = Annotated[float, Field(ge=-1.01, le=1.01, allow_inf_nan=False)]
"""A cosine, with a margin for rounding errors."""
Magnitude = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Speed = Annotated[float, Field(gt=0, le=HIGHEST_CLAIM, allow_inf_nan=False)]
Mebibytes = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
LengthText = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,9}$")]
"""A sequence length as the key of a JSON object."""

FiniteBenchmarks = Annotated[
    dict[
        LengthText,
        Annotated[dict[Annotated[str, Field(max_length=32)], Magnitude], Field(max_length=8)],
    ],
    Field(max_length=32),
]
"""`Benchmarks` as a request may carry them: finite, not negative, and few enough to list."""


def known_figures(benchmarks: Benchmarks | None, target: int) -> Benchmarks | None:
    """Return the figures that a server keeps: those of known lengths and of the target."""
    if benchmarks is None:
        return None
    return {
        length: {name: row[name] for name in FIGURES if name in row}
        for length, row in benchmarks.items()
        if int(length) in KNOWN_LENGTHS or int(length) == target
    }


_MOMENT = TypeAdapter(datetime)

SAME_SECONDS = 1.0
"""Largest difference of two texts of one instant: some servers leave out fractions of a second."""


def unix_time(text: str) -> float:
    """Return a time of the wire as Unix seconds; 0 for anything else.

    Servers write one instant as `2026-01-02T03:04:05`, with `Z`, an offset, fractions of a second
    or a space in place of the `T`. Without an offset it is UTC.
    """
    try:
        parsed = _MOMENT.validate_python(text.strip())
        moment = parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)
        return max(0.0, moment.timestamp())
    except (ValueError, OverflowError):
        return 0.0


def is_same_instant(one: str, other: str) -> bool:
    """Return whether two texts may name one instant: True if one of them is not a time."""
    times = unix_time(one), unix_time(other)
    return one == other or 0.0 in times or abs(times[0] - times[1]) <= SAME_SECONDS


class Message(BaseModel):
    """Base of every message; it ignores unknown fields, which a newer server may send."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


RankingName = Annotated[
    Ranking, BeforeValidator(lambda name: "verified" if name == "verified" else "claim")
]
"""A round's rule; an unknown one is read as the public rule."""


class RegisterRequest(Message):
    """Body of POST /register_miner."""

    hotkey: Text
    model_name: Text
    league: str


class RegisterReply(Message):
    """Reply of POST /register_miner."""

    status: str  # `registered` or `already_registered`
    hotkey: str
    model_name: str
    league: str
    uid: int | None = None  # an addition of this project's server


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
    wire_version: int = 1
    """An addition of this project's server: the newest wire version that it accepts."""
    ranking: RankingName = "claim"
    """An addition of this project's server: the round's rule."""


Version = Literal[2] | None
"""2 where `signature` signs `bound_text`; the public wire has no such field."""


class CommitRequest(Message):
    """Body of POST /commit_submission; `signature` signs `commitment_hash` in version 1."""

    miner_hotkey: Text
    commitment_hash: Sha256
    target_sequence_length: Target
    signature: SignatureText
    version: Version = None


class CommitReply(Message):
    """Reply of POST /commit_submission."""

    submission_id: RowId
    commitment_hash: Hex
    reveal_block: Block
    estimated_reveal_time: str
    message: str = ""


class ClaimRequest(Message):
    """A claim; its `signature` signs `submission_text(...)` in version 1."""

    miner_hotkey: Text
    fork_url: Address
    commit_hash: CommitHash
    tokens_per_sec: Speed
    signature: SignatureText
    vram_mb: Mebibytes | None = None
    benchmarks: FiniteBenchmarks | None = None
    version: Version = None


class RevealRequest(ClaimRequest):
    """Body of POST /reveal_submission."""

    submission_id: RowId
    commitment_salt: Salt
    docker_image: Address | None = None


class RevealReply(Message):
    """Reply of POST /reveal_submission."""

    submission_id: int
    miner_hotkey: str
    fork_url: str
    commit_hash: Hex
    is_revealed: bool
    message: str = ""


class SubmitRequest(ClaimRequest):
    """Body of POST /submit_kernel, the direct submission without commit and reveal."""

    target_sequence_length: Target
    repo_hash: Text | None = None


class SubmitReply(Message):
    """Reply of POST /submit_kernel; the server repeats the stored values."""

    submission_id: RowId
    created_at: str
    miner_hotkey: str | None = None
    fork_url: str | None = None
    commit_hash: Hex | None = None
    repo_hash: str | None = None
    target_sequence_length: int | None = None
    tokens_per_sec: float | None = None
    vram_mb: float | None = None
    benchmarks: Benchmarks | None = None


MIN_HASH_DIGITS = 8
"""Digits of a commitment hash that identify it among one hotkey's open commitments."""


class PendingReveal(Message):
    """A commitment that waits for its reveal, with the first 16 digits of its hash and `...`."""

    submission_id: RowId
    miner_hotkey: str
    commitment_hash: Hex
    reveal_block: Block
    blocks_remaining: int
    can_reveal: bool
    created_at: str

    def is_of(self, hotkey: str, commitment: str) -> bool:
        """Return whether this row is the commitment `commitment` of `hotkey`."""
        prefix = self.commitment_hash.rstrip(".\u2026")
        shown = len(prefix) >= MIN_HASH_DIGITS and commitment.startswith(prefix)
        return self.miner_hotkey == hotkey and shown


class PendingReveals(Message):
    """Reply of GET /pending_reveals."""

    current_block: Block
    pending_reveals: Rows[PendingReveal] = Field(default_factory=list)

    def row_of(self, hotkey: str, commitment: str) -> PendingReveal | None:
        """Return the row of the commitment `commitment` of `hotkey`, if it is listed."""
        return next((row for row in self.pending_reveals if row.is_of(hotkey, commitment)), None)


class QueuedSubmission(Message):
    """A submission without a verdict: a row of /get_submission_stats or /validation_queue.

    A committed row has no `fork_url`, `commit_hash` and `tokens_per_sec` until its reveal.
    """

    id: RowId
    miner_hotkey: str
    fork_url: str | None = None
    commit_hash: Hex | None = None
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
    recent_submissions: Rows[QueuedSubmission] = Field(default_factory=list)
    stats: dict[str, Any] = Field(default_factory=dict)
    top_performers: Rows[Performer] = Field(default_factory=list)


class Weight(Message):
    """One row of GET /get_weights, best rank first."""

    uid: int
    hotkey: str
    weight: float


class Weights(Message):
    """Reply of GET /get_weights; `ranking`, the round's rule, is this project's addition."""

    epoch: int
    ranking: RankingName = "claim"
    weights: Rows[Weight] = Field(default_factory=list)


class ValidationQueue(Message):
    """Reply of GET /validation_queue: the oldest first, `next_after` None at the end.

    The last page has the weighted score that a claim must exceed to earn a share of the emission.
    """

    submissions: Rows[QueuedSubmission] = Field(default_factory=list)
    next_after: RowId | None = None
    score_to_earn: Shown = None


class MarkValidatedRequest(Message):
    """Body of POST /mark_validated; a score of 0 excludes the submission from the ranking.

    The server answers 400, not 422, when `submission_id` is missing. `reason`, `measured` (by
    length, as `benchmarks`) and `device` (the GPU or CPU that timed it) are optional additions of
    this project: the public wire has none of them.
    """

    submission_id: RowId | None = None
    score: Magnitude
    reason: Annotated[str | None, Field(max_length=2048), AfterValidator(_printable)] = None
    measured: FiniteBenchmarks | None = None
    device: Annotated[str | None, Field(max_length=128), AfterValidator(_printable)] = None


class Verification(Message):
    """Query of POST /record_verification: the outcome of a logit verification."""

    submission_id: RowId
    verified: bool
    cosine_similarity: Cosine | None = None
    max_abs_diff: Magnitude | None = None
    throughput: Magnitude | None = None
    reason: Annotated[str | None, Field(max_length=2048), AfterValidator(_printable)] = None


class FailureRequest(Message):
    """Body of POST /record_failure, and of POST /lift_ban, which the public wire lacks."""

    ip_address: Text


class WithdrawRequest(Message):
    """Body of POST /withdraw_submission, an addition of this project."""

    submission_id: RowId
    reason: Annotated[str, Field(max_length=1024), AfterValidator(_printable)] = ""


class QueuePlace(Message):
    """Reply of GET /queue_place/{submission_id}, an addition of this project."""

    place: Place | None = Field(description="by age, 1 for the oldest; null if it is not queued")
    queued: int = Field(ge=0, description="submissions that wait for a validator")
    # at the pace of the last verdicts; None if there were too few
    estimated_seconds: Shown = None


class CreateRoundRequest(Message):
    """Body of POST /create_round."""

    duration_hours: int = Field(default=ROUND_HOURS, gt=0, le=MAX_HOURS)
    baseline_submission_id: RowId | None = None


# In version 2, commitments and signatures bind every field, so that nobody can replace one.
# Version 1, the public wire, leaves some unbound: the target of a submission, the number of a
# reveal, and the commit and the claim of a commitment.

COMMITTED = {"miner_hotkey", "fork_url", "commit_hash", "tokens_per_sec", "vram_mb", "benchmarks"}
"""The fields of a reveal that its commitment binds, in addition to the salt and the target."""


def bound_commitment(salt: str, target_sequence_length: int, claim: ClaimRequest) -> str:
    """Return the lower-case SHA-256 hex that commits to the whole claim."""
    values = claim.model_dump(mode="json", include=COMMITTED, exclude_none=True)
    values |= {"commitment_salt": salt, "target_sequence_length": target_sequence_length}
    return hashlib.sha256(f"quasar-commitment-2\n{_canonical(values)}".encode()).hexdigest()


def commitment(
    wire_version: int, salt: str, target_sequence_length: int, claim: Mapping[str, Any]
) -> str:
    """Return the hash that commits to a claim, the unsigned fields of a `ClaimRequest`.

    In version 1 it binds only the salt and the fork's URL.
    """
    if wire_version < WIRE_VERSION:
        return commitment_hash(salt, claim["fork_url"])
    return bound_commitment(salt, target_sequence_length, ClaimRequest(**claim, signature="-"))


def bound_text(route: str, body: BaseModel) -> str:
    """Return the text that a body's `signature` signs: the route and every other field."""
    values = body.model_dump(mode="json", exclude={"signature"}, exclude_none=True)
    return f"quasar-body-2\n{route}\n{_canonical(values)}"


def request_text(
    method: str, target: str, timestamp: str, nonce: str, body: bytes, recipient: str = ""
) -> str:
    """Return the text that a validator's Signature header signs.

    `target` is the path with any query, as sent; `timestamp` and `nonce` are as in the headers.
    With a `recipient`, a hotkey, only that miner's inference server accepts the signature, so that
    a miner cannot forward a validator's request to another miner.
    """
    digest = hashlib.sha256(body).hexdigest()
    kind = ("quasar-request-3", recipient) if recipient else ("quasar-request-2",)
    return "\n".join((*kind, method, target, timestamp, nonce, digest))


def _canonical(values: dict[str, object]) -> str:
    """Return JSON with sorted keys, without spaces, in ASCII."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
