"""Reports whether the checkout's origin has a newer commit. Nothing is installed."""

from __future__ import annotations

import threading
from pathlib import Path

from structlog.stdlib import BoundLogger

from neurons.runtime.errors import QuasarError
from neurons.runtime.git.command import HardenedGit
from neurons.runtime.git.remote import parse_remote
from neurons.runtime.values import PROJECT

LOOK_SECONDS = 10.0
EVERY_SECONDS = 86400.0
REMEDY = "See docs/operating.md, Updating, also for the way back."


def newer_commit(checkout: Path = PROJECT) -> str | None:
    """Return origin's newest commit of the current branch if this checkout lacks it.

    Return None also if there is no origin or branch, or if origin cannot be read without a token.
    """
    tool = HardenedGit(checkout, timeout=LOOK_SECONDS)
    try:
        branch = tool.probe("symbolic-ref", "--quiet", "HEAD")
        origin = tool.probe("remote", "get-url", "origin")
        if not branch or not origin:
            return None
        remote = parse_remote(origin, base=tool.folder)
        answer = tool.online(remote, None, "ls-remote", "--exit-code", "--", remote.url, branch)
    except (QuasarError, ValueError):
        return None
    commit = answer.split()[0]
    known = tool.probe("merge-base", "--is-ancestor", commit, "HEAD")
    return None if known is not None else commit


def log_updates(log: BoundLogger, stop: threading.Event) -> None:
    """Log an available update now and once a day until `stop` is set; for a separate thread."""
    while True:
        commit = newer_commit()
        if commit is not None:
            log.info("update available", commit=commit[:12], remedy=REMEDY)
        if stop.wait(EVERY_SECONDS):
            return
