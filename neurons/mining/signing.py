"""What is signed: the claim of a reveal and of a direct submission, exactly as frozen."""

from __future__ import annotations

from typing import Any

from neurons.http.connection import Signer
from neurons.mining.cycle import Submission
from neurons.protocol import RevealRequest, submission_text


def signed_claim(submission: Submission, identity: Signer) -> dict[str, Any]:
    """Return hotkey, fork, commit, claim and signature, exactly as the journal froze them."""
    fork_url, commit_hash = str(submission.fork_url), str(submission.commit_hash)
    speed = float(submission.tokens_per_sec or 0.0)
    text = submission_text(fork_url, commit_hash, speed, submission.benchmarks)
    return {
        "miner_hotkey": submission.hotkey,
        "fork_url": fork_url,
        "commit_hash": commit_hash,
        "tokens_per_sec": speed,
        "vram_mb": submission.vram_mb,
        "benchmarks": submission.benchmarks,
        "signature": identity.sign(text),
    }


def reveal_request(submission: Submission, identity: Signer) -> RevealRequest:
    """Return the reveal of a commitment, with the salt that the journal kept for it."""
    return RevealRequest(
        submission_id=int(submission.submission_id or 0),
        commitment_salt=str(submission.salt),
        **signed_claim(submission, identity),
    )
