"""The results of a competition: verdicts, weights of the ended round, and their table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx

from neurons.embedded.participants import Entry
from neurons.runtime.identity import Identity
from neurons.wire.connection import Connection
from neurons.wire.protocol import Message, Round, Weights
from neurons.wire.rules import TOP_SHARES


@dataclass(frozen=True)
class Results:
    """Reads the results of the entries from the API and the validator's log."""

    url: str
    entries: Sequence[Entry]
    validator: Identity  # signs the request that ends the round
    lines: Collection[Mapping[str, Any]]  # of the validator's log since the competition began

    def all_judged(self) -> bool:
        """Store the verdicts in the entries; return whether each has one."""
        reply = httpx.get(f"{self.url}/get_submission_stats", params={"limit": 100})
        rows = reply.json()["top_performers"]
        reasons = {int(line["submission"]): str(line["reason"]) for line in self._logged("verdict")}
        for entry in self.entries:
            own = [row for row in rows if row["miner_hotkey"] == entry.identity.hotkey]
            entry.row = next((row for row in own if row.get("validated")), entry.row)
            entry.reason = reasons.get(int((entry.row or {}).get("id", -1)), "")
        return all(entry.row and entry.reason for entry in self.entries)

    def end_round(self) -> str:
        """End the round by a validator's request and store the weights; return a progress line."""
        with closing(Connection(self.url, self.validator)) as api:
            ending = api.exchange("GET", "/get_current_round", Round)
            api.exchange("POST", f"/finalize_round/{ending.id}", Message, bound=True)
            only = {"round_id": ending.id}
            shares = api.exchange("GET", "/get_weights", Weights, query=only).weights
        for entry in self.entries:
            own = [row.weight for row in shares if row.hotkey == entry.identity.hotkey]
            entry.weight = sum(own)
        return f"round {ending.round_number} has ended"

    def are_final(self) -> bool:
        """Store the final places; return whether the validator logged these weights."""
        self.all_judged()
        shares = {entry.identity.hotkey: entry.weight for entry in self.entries if entry.weight}
        return any(line["shares"] == shares for line in self._logged("weights"))

    def table(self) -> Iterator[str]:
        """Yield the lines of the round's ranking."""
        yield f"{'rank':>4}  {'miner':<8} {'kernel':<24} {'claim':>11} {'weight':>6}  verdict"
        for entry in sorted(self.entries, key=lambda entry: entry.rank or 99):
            claim = (entry.row or {}).get("tokens_per_sec", 0.0)
            yield (
                f"{entry.rank or '-':>4}  {entry.name:<8} {entry.kernel:<24} "
                f"{claim:>11,.1f} {entry.weight:>6.2f}  {entry.reason}"
            )

    def _logged(self, event: str) -> list[Mapping[str, Any]]:
        return [line for line in list(self.lines) if line["event"] == event]


def is_expected_result(honest: Sequence[Entry], cheat: Entry | None) -> bool:
    """Return whether each honest miner has a rank and its share, and the cheat neither."""
    ranks = sorted(entry.rank or 0 for entry in honest)
    shares = sorted((entry.weight for entry in honest), reverse=True)
    expected = [*TOP_SHARES, *(0.0 for _ in honest)][: len(honest)]
    ranked = ranks == list(range(1, len(honest) + 1)) and shares == expected
    return ranked and (
        cheat is None or bool(cheat.reason and not cheat.rank and cheat.weight == 0.0)
    )
