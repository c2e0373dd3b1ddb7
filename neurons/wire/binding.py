"""Version 2 of what is signed and committed to: all of it, so that no part can be exchanged.

The public wire, version 1, leaves out the target of a submission, the number of a reveal, and the
commit and claim of a commitment. It stays as it is in `neurons.wire.protocol`. This project's own
server offers version 2 beside it (`wire_version` of the round), and its miner then uses it.
"""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel

from neurons.wire.protocol import ClaimRequest

COMMITTED = {"miner_hotkey", "fork_url", "commit_hash", "tokens_per_sec", "vram_mb", "benchmarks"}
"""The fields of a reveal that its commitment binds, beside the salt and the target."""


def bound_commitment(salt: str, target_sequence_length: int, claim: ClaimRequest) -> str:
    """Return the lower-case SHA-256 hex that commits to the whole claim."""
    values = claim.model_dump(mode="json", include=COMMITTED, exclude_none=True)
    values |= {"commitment_salt": salt, "target_sequence_length": target_sequence_length}
    return hashlib.sha256(f"quasar-commitment-2\n{_canonical(values)}".encode()).hexdigest()


def bound_text(route: str, body: BaseModel) -> str:
    """Return the text that a body's `signature` signs: the route and every other field."""
    values = body.model_dump(mode="json", exclude={"signature"}, exclude_none=True)
    return f"quasar-body-2\n{route}\n{_canonical(values)}"


def request_text(method: str, target: str, timestamp: str, nonce: str, body: bytes) -> str:
    """Return the text that a validator's Signature header signs.

    Args:
        target: the path, and `?` with the query where there is one, as sent.
        timestamp: Unix seconds, as in the header.
        nonce: as in the header; one is taken once.
        body: the bytes sent, empty without a body.
    """
    digest = hashlib.sha256(body).hexdigest()
    return "\n".join(("quasar-request-2", method, target, timestamp, nonce, digest))


def _canonical(values: dict[str, object]) -> str:
    """Return JSON with sorted keys, without spaces, in ASCII."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
