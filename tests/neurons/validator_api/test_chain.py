"""Uids and validators from the chain."""

from pathlib import Path

from neurons.runtime.identity import ChainUnreachable, Neuron
from tests.neurons.live_api import ALICE, BOB, VALIDATOR, Hotkey, commitment, serve, submission
from tests.processes import wait_for

POOR = Hotkey("//Poor")


class Chain:
    """A chain whose reply the test sets; None: it cannot be reached."""

    def __init__(self) -> None:
        self.neurons: dict[str, Neuron] | None = None
        self.calls = 0

    def __call__(self) -> dict[str, Neuron]:
        self.calls += 1
        if self.neurons is None:
            raise ChainUnreachable("no answer")
        return self.neurons

    def wait(self) -> None:
        """Return when the API has used a reply that follows this call."""
        before = self.calls
        wait_for(lambda: self.calls > before + 1)


def test_uids_and_validators_are_the_chains(tmp_path: Path) -> None:
    chain = Chain()
    settings = {"neurons": chain, "chain_seconds": 0.01, "validator_stake": 1000.0}
    with serve(tmp_path, validator_hotkeys=frozenset(), **settings) as api:
        chain.wait()
        assert api.register(ALICE)["uid"] is None  # not a number of the API's own
        row = api.submit(ALICE, 5.0)
        mark = {"submission_id": row, "score": 1.0}
        assert api.verdict("/mark_validated", mark).status_code == 403
        chain.neurons = {
            VALIDATOR.hotkey: Neuron(3, 1000.0),
            POOR.hotkey: Neuron(4, 999.0),
            ALICE.hotkey: Neuron(217, 0.0),
        }
        chain.wait()
        assert (api.register(ALICE)["uid"], api.register(BOB)["uid"]) == (217, None)
        assert api.verdict("/mark_validated", mark, POOR).status_code == 403
        chain.neurons = None  # the API keeps the last reply
        chain.wait()
        assert api.verdict("/mark_validated", mark).status_code == 200
        api.judge("/finalize_round/1", {})
        (weight,) = api.get("/get_weights")["weights"]
        assert (weight["uid"], weight["hotkey"]) == (217, ALICE.hotkey)


def test_only_hotkeys_of_the_subnet_may_submit(tmp_path: Path) -> None:
    chain = Chain()
    settings = {"neurons": chain, "chain_seconds": 0.01, "require_registration": True}
    with serve(tmp_path, **settings) as api:
        body = {"hotkey": ALICE.hotkey, "model_name": "Qwen", "league": "100k"}
        status, detail = api.refusal("/register_miner", body, ALICE)
        assert (status, "not known yet" in detail) == (503, True)  # nor is anyone let in
        chain.neurons = {ALICE.hotkey: Neuron(217, 0.0), BOB.hotkey: Neuron(218, 0.0)}
        chain.wait()
        assert api.register(ALICE)["uid"] == 217
        api.register(BOB)
        chain.neurons = {ALICE.hotkey: Neuron(217, 0.0)}
        chain.wait()
        chain.neurons = None  # the last list holds
        chain.wait()
        api.submit(ALICE, 5.0)
        api.commit(ALICE)
        refused = (403, "Hotkey not registered on subnet 24 of finney")
        assert api.refusal("/submit_kernel", submission(BOB), BOB) == refused
        assert api.refusal("/commit_submission", commitment(BOB), BOB) == refused
        body = {"hotkey": POOR.hotkey, "model_name": "Qwen", "league": "100k"}
        assert api.refusal("/register_miner", body, POOR) == refused
