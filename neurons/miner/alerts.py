"""Alerts for events that an operator should know: ALERT_COMMAND, ALERT_URL, or both.

`python -m neurons.miner.alerts`, a child process that can be killed, posts the JSON alert that it
reads from stdin.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from structlog.stdlib import BoundLogger

from harness.files import write_atomically
from harness.terminal import printable
from neurons.runtime.child import run_command
from neurons.runtime.errors import ConfigError
from neurons.runtime.loading import environment
from neurons.runtime.network import client_options, failure_reason
from neurons.runtime.observe import get_logger, redact
from neurons.runtime.settings import Settings
from neurons.runtime.values import PROJECT

ALERT_SECONDS = 30.0
POST_SECONDS = 20.0
MAX_LETTERS = 1000
MAX_WAITING = 100
# the variables that a command may need to reach the network
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")


@dataclass(frozen=True)
class Way:
    """A command that reads an alert from its stdin and sends it; `setting` names its setting."""

    setting: str
    words: list[str]
    # ALERT_URL, which may contain a key: the command reads it and the alert as JSON
    url: str = field(default="", repr=False)

    def text(self, kind: str, sentence: str) -> str:
        """Return what the command reads."""
        alert = {"url": self.url, "kind": kind, "text": sentence}
        return json.dumps(alert) if self.url else sentence


def ways(settings: Settings) -> list[Way]:
    """Return the ways that the settings name."""
    found = []
    if settings.alert_command:
        found.append(Way("ALERT_COMMAND", settings.words_of(settings.alert_command)))
    if settings.alert_url:
        post = [sys.executable, "-m", "neurons.miner.alerts"]
        found.append(Way("ALERT_URL", post, settings.alert_url.get_secret_value()))
    return found


class Alerts:
    """Sends alerts from a separate thread, so that no alert can stop or delay the miner.

    Each way sends an alert in a child process, which is killed after `seconds`. Failures are only
    logged. `file` stores which conditions have been reported, so that a restart does not repeat
    them.
    """

    def __init__(
        self,
        ways: list[Way] | None = None,
        file: Path | None = None,
        sender: str = "quasar-miner",
        log: BoundLogger | None = None,
        seconds: float = ALERT_SECONDS,
    ) -> None:
        self._ways, self._file, self._sender = ways or [], file, sender
        self._log, self._seconds = log or get_logger("alerts"), seconds
        self._waiting: queue.Queue[tuple[str, str] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._begun: set[str] = set()
        with suppress(OSError, ValueError, TypeError):
            self._begun = set(json.loads(file.read_text())) if file else set()

    def begin(self, kind: str, text: str, about: object = "") -> None:
        """Report a condition; do not repeat it before `end` was called for it."""
        if self._change(f"{kind} {about}", begins=True):
            self.send(kind, text)

    def end(self, kind: str, about: object = "") -> None:
        self._change(f"{kind} {about}", begins=False)

    def send(self, kind: str, text: str) -> None:
        """Report an event, without secrets and control characters."""
        if not self._ways:
            return
        text = printable(" ".join(redact(f"{self._sender}: {text}").split()))[:MAX_LETTERS]
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
                self._thread.start()
        try:
            self._waiting.put_nowait((kind, text))
        except queue.Full:
            self._log.warning("an alert is dropped: too many alerts wait", kind=kind)

    def close(self, seconds: float) -> None:
        """Wait until all alerts are sent, at most `seconds`."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put_nowait(None)
                self._thread.join(seconds)

    def _change(self, key: str, *, begins: bool) -> bool:
        """Store that a condition begins or ends; return False if it already has."""
        with self._lock:
            if (key in self._begun) == begins:
                return False
            self._begun ^= {key}
            if self._file and self._ways:
                with suppress(OSError):  # on a full disk; a restart then repeats the report
                    write_atomically(self._file, json.dumps(sorted(self._begun)), mode=0o600)
        return True

    def _run(self) -> None:
        variables = {n: value for n, value in environment().items() if n.lower() in PROXIES}
        while (alert := self._waiting.get()) is not None:
            kind, text = alert
            variables |= {"ALERT_KIND": kind, "ALERT_TEXT": text}
            for way in self._ways:
                try:
                    problem = run_command(
                        way.words,
                        text=way.text(kind, text),
                        variables=variables,
                        cwd=PROJECT,
                        seconds=self._seconds,
                    )
                except Exception as error:  # whatever happens, the next alert must be sent
                    problem = str(error)
                if problem:
                    self._log.warning("an alert failed", setting=way.setting, reason=problem)


def _post() -> str:
    """Post the alert of stdin as JSON with the fields of common chat webhooks."""
    alert = json.load(sys.stdin)
    body = {"kind": alert["kind"], "text": alert["text"], "content": alert["text"]}
    try:
        options = client_options(alert["url"])
        with httpx.stream(
            "POST", alert["url"], json=body, timeout=POST_SECONDS, **options
        ) as reply:
            return "" if reply.is_success else f"the server answered {reply.status_code}"
    except httpx.HTTPError as error:
        return f"the server cannot be reached ({failure_reason(error)})"
    except ConfigError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(_post() or 0)
