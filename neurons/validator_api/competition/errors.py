"""Reasons for refusals by the competition; `routes/errors.py` maps each type to an HTTP status."""

from __future__ import annotations


class Refusal(Exception):
    """The request breaks a rule of the competition; nothing was written."""


class Invalid(Refusal):
    """The request is inconsistent in itself or with the rows that it refers to."""


class CommitmentMismatch(Invalid):
    """The reveal does not hash to its commitment; it counts as a failure of the client."""

    def __init__(self) -> None:
        super().__init__("Commitment verification failed. Hash mismatch.")


class NotFound(Refusal):
    """The hotkey, submission or round does not exist."""


class Banned(Refusal):
    """The client is banned."""


class Replayed(Refusal):
    """A validator's signed request was received a second time."""


class Conflict(Refusal):
    """The request repeats or contradicts something that is stored."""


class TooEarly(Refusal):
    """The reveal came before its block."""
