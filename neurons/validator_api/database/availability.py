"""Tells a database that is away, locked or full from a fault of the program, and says so once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnection

from neurons.runtime.errors import QuasarError
from neurons.runtime.observe import get_logger, redact_text

PASSING = (OperationalError, InterfaceError, NoConnection)
"""What drivers raise of a database that does not answer, is locked, or has no space left."""
_REFUSED = "FATAL"
_SOON = ("starting up", "shutting down", "not yet accepting", "too many", "slots")

log = get_logger("validator_api")


class DatabaseAway(QuasarError):
    """The database cannot be used now; what is asked of it may be asked again later."""


class Availability:
    """Knows since when a database does not do what it is asked, and logs the change alone.

    Args:
        url: what the log calls the database.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._failing: dict[str, float] = {}

    @contextmanager
    def of(self, act: str) -> Iterator[None]:
        """Surround one transaction; `act` is its kind, as a full disk still lets others read.

        Raises:
            DatabaseAway: it failed through the database.
        """
        try:
            yield
        except PASSING as error:
            said = reason(error)
            self._note_failure(act, said)
            raise DatabaseAway(said) from error
        if self._failing:
            self._note_success(act)

    def _note_failure(self, act: str, said: str) -> None:
        with self._lock:
            first = not self._failing
            self._failing.setdefault(act, time.monotonic())
        if first:
            log.error(
                "the database does not do what it is asked; such calls get 503 until it does",
                database=self._url,
                reason=said,
            )

    def _note_success(self, act: str) -> None:
        with self._lock:
            since = self._failing.pop(act, None)
            last = since is not None and not self._failing
        if last and since is not None:
            log.info("the database is back", seconds=round(time.monotonic() - since, 1))


def reason(error: SQLAlchemyError) -> str:
    """Return what the driver says, as one line; SQLAlchemy adds the statement and its values."""
    return redact_text(str(error.orig if isinstance(error, DBAPIError) else error))


def is_refused(said: str) -> bool:
    """Tell of a driver's words whether a server has answered and will not change its mind."""
    return _REFUSED in said and not any(words in said for words in _SOON)
