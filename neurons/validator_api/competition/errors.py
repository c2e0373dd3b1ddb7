"""Exceptions for requests that the competition refuses; `routes/errors.py` answers them."""

from __future__ import annotations


class Refusal(Exception):
    """The request breaks a rule of the competition; nothing was written."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class CommitmentMismatch(Refusal):
    """The reveal does not match its commitment; this counts as a failure of the client."""

    def __init__(self) -> None:
        super().__init__(400, "Commitment verification failed. Hash mismatch.")
