"""Exceptions that several modules use, one type for each reaction."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NamedTuple

EX_CONFIG = 78
"""Exit status for faults that the operator must correct (sysexits.h); pm2 then does not restart."""


class QuasarError(Exception):
    """Base class of all exceptions of this project."""


class Problem(NamedTuple):
    """A fault, as a clause or a sentence, and its remedy if one is known."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = " " if self.problem.endswith(".") else ": "
        return mark.join(filter(None, self))


class ConfigError(QuasarError):
    """The operator must correct settings, wallet, journal or lock: exit status 78.

    A problem that is only a text must contain its remedy. `str` has one problem per line.
    """

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(Problem(one) if isinstance(one, str) else one for one in problems)
        super().__init__("\n".join(map(str, self.problems)))


def not_writable(state_dir: Path, error: OSError) -> ConfigError:
    """Return the error, with its remedy, for a state folder that cannot be written."""
    remedy = "Make the user that runs this program its owner (chown), or set another STATE_DIR."
    if error.errno == errno.EROFS:
        remedy = (
            "Make its file system writable, add the folder to ReadWritePaths if a systemd unit "
            "starts this program, or set another STATE_DIR."
        )
    problem = f"The state folder {state_dir} cannot be written ({error.strerror})."
    return ConfigError(Problem(problem, remedy))


class Fault(QuasarError):
    """A submission's step failed. The miner pauses it, then runs the step again.

    `reason` and `remedy` contain no secrets. During the pause it is FAILED, or HELD after more than
    `held_after` failures in a row; None means never HELD. `after` is the minimum pause in seconds
    that the server requested.
    """

    def __init__(
        self,
        reason: str,
        remedy: str = "",
        after: float | None = None,
        held_after: int | None = None,
    ) -> None:
        super().__init__(f"{reason} {remedy}".rstrip())
        self.reason = reason
        self.remedy = remedy
        self.after = after
        self.held_after = held_after


class Retry(Fault):
    """A temporary fault: the pauses are short, and last at least `after` seconds."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason, after=after)


class Held(Fault):
    """A fault that probably does not end by itself: the submission is HELD, with long pauses."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason, remedy, held_after=0)


class HeldUntilRelease(Held):
    """A fault after which only the command `release` continues the submission."""


class Postponed(QuasarError):
    """This machine or the network failed; `remedy` is empty if waiting is enough."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy
