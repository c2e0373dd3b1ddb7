"""All calls of the API's client by route, with valid bodies."""

from collections.abc import Callable
from typing import Any

from neurons.wire.client import ApiClient
from tests.neurons.miner.parts import HOTKEY, Key

STATS = "/get_submission_stats"
SIGNED = ("/register_miner", "/submit_kernel", "/commit_submission", "/reveal_submission")
COMMITMENT = ("c" * 64, 2048, 1)
"""Arguments of `ApiClient.commit`."""
CLAIM: dict[str, Any] = {
    "miner_hotkey": HOTKEY,
    "fork_url": "https://github.com/alice/fork",
    "commit_hash": "a" * 40,
    "tokens_per_sec": 1.5,
}


def every_call(client: ApiClient) -> dict[str, Callable[[], object]]:
    return {
        "/get_current_round": client.current_round,
        "/pending_reveals": client.pending_reveals,
        "/get_submission_stats": lambda: client.queue(50),
        "/get_weights": lambda: client.weights(1),
        "/register_miner": lambda: client.register("model", "100k"),
        "/commit_submission": lambda: client.commit(*COMMITMENT),
        "/reveal_submission": lambda: client.reveal(1, "5" * 64, CLAIM, 1),
        "/submit_kernel": lambda: client.submit(2048, CLAIM, 1),
    }


ROUTES = tuple(every_call(ApiClient("http://127.0.0.1", Key())))
