"""The validator's client of the API: it reads the queue, writes verdicts and ends rounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import stamina
from pydantic import ValidationError

from neurons.runtime.errors import ConfigError, Held, QuasarError, Retry
from neurons.runtime.identity import Identity
from neurons.runtime.observe import get_logger
from neurons.wire import protocol
from neurons.wire.connection import Connection, Reply
from neurons.wire.outcomes import Forbidden, ForeignPage, ProtocolFault, Unauthorized

QUEUE_PAGES = 1000
"""Limit on the pages of the queue that one call reads. It is high, because the oldest submissions
may be postponed for long and must not hide those of others."""
QUEUE_BYTES = 2**22
REPLY_SECONDS = 8.0
REASON_LETTERS = 2000
DEVICE_LETTERS = 120
ATTEMPTS = 3
PAUSE_SECONDS = 2.0

log = get_logger("validator")


class _Queue(protocol.Message):
    """A page of GET /validation_queue; `queue` checks the form of each row separately."""

    submissions: Sequence[Any]
    next_after: int | None = None
    score_to_earn: protocol.Shown = None


class ApiFault(QuasarError):
    """The API did not answer, refused the call or violated the protocol; the next poll retries."""


class JudgedBefore(ApiFault):
    """Another validator has judged the submission, and the first verdict counts."""


class ValidatorApi(Connection):
    """Calls of one validator API, signed by `identity`, a validator.

    A call raises a ConfigError if the API does not accept the hotkey, and an ApiFault for any other
    failure. Failed calls are not retried once `stop` is set.
    """

    def __init__(
        self,
        base_url: str,
        identity: Identity,
        *,
        stop: threading.Event | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(
            *(base_url, identity),
            transport=transport,
            reply_seconds=REPLY_SECONDS,
            reply_bytes=QUEUE_BYTES,
        )
        self.signer = identity
        self.score_to_earn: float | None = None  # as of the last `queue`
        self._stop = stop or threading.Event()

    def queue(self) -> list[protocol.QueuedSubmission]:
        """Return the revealed submissions without a verdict, the oldest first.

        A row that violates the protocol is omitted, so that it cannot block the others.
        """
        queued = []
        for row in self._queued_rows():
            try:
                queued.append(protocol.QueuedSubmission.model_validate(row))
            except ValidationError as error:
                log.warning("malformed row in the queue", problem=str(error.errors()[0]["msg"]))
        open_rows = [
            row
            for row in queued
            if row.is_revealed and not row.validated and row.fork_url and row.commit_hash
        ]
        return sorted(open_rows, key=lambda row: (row.created_at, row.id))

    def is_queued(self, submission: protocol.QueuedSubmission) -> bool:
        """Return whether the submission still waits for a verdict."""
        query = {"after": submission.id - 1, "limit": 1}
        page = self._call("GET", "/validation_queue", _Queue, query=query)
        return any(
            isinstance(row, dict) and row.get("id") == submission.id for row in page.submissions
        )

    def _queued_rows(self) -> Iterator[Any]:
        after = 0
        for _ in range(QUEUE_PAGES):
            page = self._call("GET", "/validation_queue", _Queue, query={"after": after})
            yield from page.submissions
            self.score_to_earn = page.score_to_earn
            if page.next_after is None or page.next_after <= after:
                return
            after = page.next_after

    def mark(
        self,
        submission_id: int,
        score: float,
        reason: str | None = None,
        measured: protocol.Benchmarks | None = None,
        device: str | None = None,
    ) -> None:
        """Write a verdict: score, reason, measured figures by length, and the device.

        Figures are reduced to the wire's limit: a tiny claim gives a huge score, and a fork may
        report any memory.
        """
        if measured is not None:
            measured = {
                length: {name: min(value, protocol.LARGEST) for name, value in row.items()}
                for length, row in measured.items()
            }
        body = protocol.MarkValidatedRequest(
            submission_id=submission_id,
            score=min(score, protocol.LARGEST),
            reason=reason and reason[:REASON_LETTERS],
            measured=measured,
            device=device and device[:DEVICE_LETTERS],
        )
        self._call("POST", "/mark_validated", protocol.Message, body=body)

    def record_verification(self, verification: protocol.Verification) -> None:
        """Write the outcome of a logit verification; the API does not rank a failed submission."""
        query = verification.model_dump(exclude_none=True)
        self._call("POST", "/record_verification", protocol.Message, query=query)

    def record_failure(self, address: str) -> None:
        """Count a failed submission against the address it was sent from."""
        body = protocol.FailureRequest(ip_address=address)
        self._call("POST", "/record_failure", protocol.Message, body=body)

    def lift_ban(self, client: str) -> None:
        """End a client's ban: that of an address, a network or `hotkey 5...`."""
        body = protocol.FailureRequest(ip_address=client)
        self._call("POST", "/lift_ban", protocol.Message, body=body)

    def withdraw(self, submission_id: int, reason: str) -> None:
        """Give a revealed submission the final score 0."""
        body = protocol.WithdrawRequest(submission_id=submission_id, reason=reason)
        self._call("POST", "/withdraw_submission", protocol.Message, body=body)

    def current_round(self) -> protocol.Round:
        """Return the running round, or one that is over and not yet finalized."""
        return self._call("GET", "/get_current_round", protocol.Round)

    def finalize_round(self, round_id: int) -> None:
        """Finalize a round that is over, unless another validator has done so."""
        try:
            self._call("POST", f"/finalize_round/{round_id}", protocol.Message)
        except ApiFault as fault:
            if "already finalized" not in str(fault):
                raise

    def create_round(self, hours: int) -> protocol.Round:
        """End the running round, if there is one; open and return the next one.

        The request is never repeated: a second one would end the new round without a winner.
        """
        body = protocol.CreateRoundRequest(duration_hours=hours)
        return self._call("POST", "/create_round", protocol.Round, attempts=1, body=body)

    def weights(self) -> list[protocol.Weight]:
        """Return the shares of the last finalized round, the best rank first."""
        return list(self._call("GET", "/get_weights", protocol.Weights).weights)

    def _call(
        self, method: str, route: str, reply: type[Reply], attempts: int = ATTEMPTS, **options: Any
    ) -> Reply:
        """Send a signed request and return its reply; retry after a temporary fault.

        A repeated mark is harmless. If the reply to `record_failure` is lost, its repetition counts
        the failure twice, which is rare.
        """
        quickly = stamina.RetryingCaller(
            attempts=attempts, wait_initial=0.2, wait_max=PAUSE_SECONDS
        )
        try:
            return quickly(
                self._is_temporary,
                lambda: self.exchange(method, route, reply, bound=True, **options),
            )
        except (Unauthorized, Forbidden) as refusal:
            raise ConfigError(
                f"{refusal.reason} Add the validator's hotkey {self.hotkey} to the "
                "API's VALIDATOR_HOTKEYS."
            ) from None
        except (Retry, Held) as fault:
            kind = JudgedBefore if protocol.JUDGED in fault.reason else ApiFault
            raise kind(fault.reason) from None

    def _is_temporary(self, error: Exception) -> bool:
        temporary = isinstance(error, Retry) and not isinstance(error, (ForeignPage, ProtocolFault))
        return temporary and not self._stop.is_set()
