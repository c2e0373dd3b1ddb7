"""What comes of a competition: its verdicts, its round's end, and the table of both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from neurons.runtime.identity import Identity
from neurons.wire.connection import Connection, Signer
from neurons.wire.protocol import Message, Round, Weights
from neurons.wire.rules import TOP_SHARES


@dataclass
class Entry:
    """One participant: who, with which kernel, and what came of it.

    Attributes:
        row: its submission as the API shows it; None before its verdict.
        weight: its share of the emission in the round that has ended.
        reason: of its verdict, from the validator's log.
    """

    name: str
    kernel: str
    identity: Identity
    row: dict[str, Any] | None = None
    weight: float = 0.0
    reason: str = ""

    @property
    def rank(self) -> int | None:
        """Its place, None where it has none."""
        return None if self.row is None else self.row.get("rank")


class Results:
    """Reads what the API and the validator tell of the entries.

    Args:
        url: of the API.
        entries: all participants.
        validator: whose word ends the round.
        log_file: the validator's; what it says of earlier competitions does not count.
    """

    def __init__(
        self, url: str, entries: Sequence[Entry], validator: Signer, log_file: Path
    ) -> None:
        self._url, self._entries, self._validator = url, entries, validator
        self._log_file = log_file
        self._old = log_file.stat().st_size if log_file.exists() else 0

    def all_judged(self) -> bool:
        """Take up the verdicts; tell whether each participant has one."""
        reply = httpx.get(f"{self._url}/get_submission_stats", params={"limit": 100})
        rows = reply.json()["top_performers"]
        told = {int(line["submission"]): str(line["reason"]) for line in self._said("verdict")}
        for entry in self._entries:
            own = [row for row in rows if row["miner_hotkey"] == entry.identity.hotkey]
            entry.row = next((row for row in own if row.get("validated")), entry.row)
            entry.reason = told.get(int((entry.row or {}).get("id", -1)), "")
        return all(entry.row and entry.reason for entry in self._entries)

    def end_round(self) -> str:
        """End the round as its validator may, and take up the weights; return what has ended."""
        with closing(Connection(self._url, self._validator)) as api:
            ending = api.exchange("GET", "/get_current_round", Round)
            api.exchange("POST", f"/finalize_round/{ending.id}", Message, bound=True)
            only = {"round_id": ending.id}
            shares = api.exchange("GET", "/get_weights", Weights, query=only).weights
        for entry in self._entries:
            own = [row.weight for row in shares if row.hotkey == entry.identity.hotkey]
            entry.weight = sum(own)
        return f"round {ending.round_number} has ended"

    def are_final(self) -> bool:
        """Take up the places that stay; tell whether the validator has computed the same weights.

        What the API answers may be a second old.
        """
        self.all_judged()
        shares = {entry.identity.hotkey: entry.weight for entry in self._entries if entry.weight}
        return any(line["shares"] == shares for line in self._said("weights"))

    def table(self) -> Iterator[str]:
        """Yield the ranking of the round, a line each."""
        yield f"{'rank':>4}  {'miner':<8} {'kernel':<24} {'claim':>11} {'weight':>6}  verdict"
        for entry in sorted(self._entries, key=lambda entry: entry.rank or 99):
            claim = (entry.row or {}).get("tokens_per_sec", 0.0)
            yield (
                f"{entry.rank or '-':>4}  {entry.name:<8} {entry.kernel:<24} "
                f"{claim:>11,.1f} {entry.weight:>6.2f}  {entry.reason}"
            )

    def _said(self, event: str) -> Iterator[dict[str, Any]]:
        """Yield the validator's lines of one kind since the competition began."""
        if not self._log_file.exists():
            return
        with self._log_file.open("rb") as log:
            log.seek(min(self._old, self._log_file.stat().st_size))
            for line in log.read().splitlines():
                with suppress(ValueError):
                    told = json.loads(line)
                    if isinstance(told, dict) and told.get("event") == event:
                        yield told


def are_as_they_should_be(honest: Sequence[Entry], cheat: Entry | None) -> bool:
    """Tell whether every honest miner ranks and earns its place's share, and the cheat nothing."""
    places = sorted(entry.rank or 0 for entry in honest)
    shares = sorted((entry.weight for entry in honest), reverse=True)
    due = [*TOP_SHARES, *(0.0 for _ in honest)][: len(honest)]
    ranked = places == list(range(1, len(honest) + 1)) and shares == due
    return ranked and (
        cheat is None or bool(cheat.reason and not cheat.rank and cheat.weight == 0.0)
    )
