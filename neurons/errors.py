"""The exceptions that cross module borders, by what has to happen next."""

from __future__ import annotations

EX_CONFIG = 78
"""Exit status for what only a person can mend (sysexits.h); pm2 does not restart on it."""


class QuasarError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(QuasarError):
    """Settings, wallet, journal or lock need a person before anything can run: exit 78."""


class Held(QuasarError):
    """One submission must stop until a person acts.

    Args:
        reason: what happened, as a sentence without secrets.
        remedy: what the person should do.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason} {remedy}")
        self.reason = reason
        self.remedy = remedy


class Retry(QuasarError):
    """A passing fault: try the same step again later.

    Args:
        reason: what happened, as a sentence without secrets.
        after: seconds to wait at least, when the other side named them; else None.
    """

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after
