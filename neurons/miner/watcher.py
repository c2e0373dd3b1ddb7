"""A thread that checks free disk space, registration and new commits, and copies the journal."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from structlog.stdlib import BoundLogger

from neurons.miner.alerts import Alerts
from neurons.miner.schema import write_copy
from neurons.runtime.errors import ConfigError, QuasarError
from neurons.runtime.git.command import HardenedGit
from neurons.runtime.git.remote import parse_remote
from neurons.runtime.identity import (
    IF_SERVED,
    OFFLINE,
    ChainUnreachable,
    registered_uid,
    registration_command,
)
from neurons.runtime.settings import Settings
from neurons.runtime.values import PROJECT

TICK_SECONDS = 2.0
DAY_SECONDS = 86400.0
CHAIN_PAUSE_SECONDS = 300.0
"""Minimum pause between two reads of the chain; a submission calls `note_commitment` repeatedly."""
LOW_BYTES, ENOUGH_BYTES = 10**9, 15 * 10**8
"""Free bytes: below the first the disk counts as low, above the second as recovered."""
ORIGIN_SECONDS = 10.0
UPDATE_REMEDY = "See docs/maintenance.md, Updating, also for the way back."


def newer_commit(checkout: Path = PROJECT) -> str | None:
    """Return origin's newest commit of the current branch if this checkout lacks it.

    Return None also if there is no origin or branch, or if origin cannot be read without a token.
    """
    tool = HardenedGit(checkout, timeout=ORIGIN_SECONDS)
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


def copy_of(folder: Path, hotkey: str) -> Path:
    """Return a hotkey's file in the folder JOURNAL_COPY, which several miners may share."""
    return folder / f"journal-{hotkey}.sqlite"


class Watcher:
    """Runs the checks in a thread; a call that may hang has its own thread or child process.

    Args:
        journal: the journal's file, which `note_commitment` copies to JOURNAL_COPY.
        read_uid: reads the hotkey's uid from the chain.
    """

    def __init__(
        self,
        settings: Settings,
        hotkey: str,
        journal: Path,
        alerts: Alerts,
        log: BoundLogger,
        stop: threading.Event,
        read_uid: Callable[[str, int, str], int | None] = registered_uid,
    ) -> None:
        self._settings, self._hotkey, self._journal = settings, hotkey, journal
        self._alerts, self._log, self._stop, self._read_uid = alerts, log, stop, read_uid
        self._commitment = threading.Event()
        self._uid: int | None = -1  # not yet known
        self._read_at = self._next_update = float("-inf")
        self._copying: threading.Thread | None = None
        self._copy_due = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="watcher", daemon=True).start()

    def note_commitment(self) -> None:
        """Make the thread copy the journal and read the registration soon; do not wait for it."""
        self._commitment.set()

    def _run(self) -> None:
        while True:
            try:
                self.look()
                self._look_at_origin()
            except Exception as error:  # the thread must continue
                self._log.warning("watching failed", reason=str(error))
            if self._stop.wait(TICK_SECONDS):
                return

    def look(self) -> None:
        """Start every check that is due."""
        self._look_at_disk()
        asked = self._commitment.is_set()
        self._commitment.clear()
        self._copy_due |= asked and self._settings.journal_copy is not None
        self._copy()
        age = time.monotonic() - self._read_at
        if age > (CHAIN_PAUSE_SECONDS if asked else DAY_SECONDS):
            self._read_at = time.monotonic()
            self._look_at_chain()

    def _look_at_disk(self) -> None:
        free = shutil.disk_usage(self._settings.state_dir).free
        if free < LOW_BYTES:
            folder = self._settings.state_dir
            self._alerts.begin("disk", f"{free / 1e9:.2f} GB are free on the disk of {folder}")
        elif free > ENOUGH_BYTES:
            self._alerts.end("disk")

    def _look_at_chain(self) -> None:
        network, netuid = self._settings.subtensor_network, self._settings.netuid
        if network == OFFLINE:
            return
        try:
            uid = self._read_uid(self._hotkey, netuid, network)
        except ChainUnreachable as error:
            self._log.warning(f"the registration is unknown: {error}")
            return
        if uid is None:
            sentence = f"the hotkey is not registered on subnet {netuid}"
            command = registration_command(self._settings)
            if uid != self._uid:
                self._log.warning(f"{sentence}; {IF_SERVED}", remedy=command)
            self._alerts.begin("registration", f"{sentence}: {command}; {IF_SERVED}")
        else:
            self._alerts.end("registration")
            if uid != self._uid:
                self._log.info("the hotkey is registered", uid=uid, netuid=netuid)
        self._uid = uid

    def _look_at_origin(self) -> None:
        """Log an available update once a day."""
        if self._settings.subtensor_network == OFFLINE or time.monotonic() < self._next_update:
            return
        self._next_update = time.monotonic() + DAY_SECONDS
        commit = newer_commit()
        if commit is not None:
            self._log.info("update available", commit=commit[:12], remedy=UPDATE_REMEDY)

    def _copy(self) -> None:
        """Start a copy if one is due and none runs; a copy to a lost mount may hang."""
        running = self._copying is not None and self._copying.is_alive()
        if self._copy_due and not running:
            self._copy_due = False
            self._copying = threading.Thread(target=self._write_copy, name="copy", daemon=True)
            self._copying.start()
        elif self._copy_due:
            self._fail("an earlier copy still runs; the disk or mount may hang")

    def _write_copy(self) -> None:
        folder = self._settings.journal_copy
        assert folder is not None  # noqa: S101 # otherwise no copy is due
        try:
            write_copy(self._journal, copy_of(folder, self._hotkey))
        except ConfigError as error:
            self._fail(str(error))
        else:
            self._alerts.end("journal copy")

    def _fail(self, reason: str) -> None:
        self._log.warning("the journal is not copied to JOURNAL_COPY", reason=reason)
        self._alerts.begin("journal copy", f"the journal is not copied to JOURNAL_COPY: {reason}")
