"""Shows new lines of a child process's JSON log in this process's log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from neurons.runtime.observe import get_logger

LEFT_OUT = ("event", "level", "logger", "timestamp", "exception")

log = get_logger("embedded")


class LogTail:
    """Reads the lines that a log of JSON objects gains after this object's creation.

    The file may be missing, and may be truncated. Each shown line begins with `name`.
    """

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self._position = file.stat().st_size if file.exists() else 0

    def show(self) -> list[dict[str, Any]]:
        """Show the complete lines that were added since the last call; return the JSON objects."""
        entries = self._entries()
        for entry in entries:
            details = {key: value for key, value in entry.items() if key not in LEFT_OUT}
            level = getattr(logging, str(entry.get("level")).upper(), logging.INFO)
            log.log(level, f"{self.name}: {entry['event']}", **details)
        return entries

    def _entries(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            size = file.seek(0, 2)
            if size < self._position:
                self._position = 0
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        entries = []
        for line in whole.decode(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            if isinstance(entry, dict) and "event" in entry:
                entries.append(entry)
        return entries
