"""Refusals by the competition, which `routes/errors.py` answers."""

from __future__ import annotations


class Refusal(Exception):
    """The request breaks a rule of the competition, with an HTTP status; nothing was written."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class CommitmentMismatch(Refusal):
    """The reveal does not hash to its commitment; it counts as a failure of the client."""

    def __init__(self) -> None:
        super().__init__(400, "Commitment verification failed. Hash mismatch.")
