"""Finalized rounds and weights, with a live API, and with the SDK over a chain in memory.

bittensor's clients accept any `Substrate`; `Chain` answers the queries of `SetWeights` and records
the call.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bittensor as bt
import pytest
from structlog.testing import capture_logs

from neurons.runtime.identity import ChainUnreachable, create_throwaway, submit_weights
from neurons.validator.api import ValidatorApi
from neurons.validator.weights import WeightSetter, shares_of
from neurons.wire.protocol import Weight
from tests.neurons.live_api import ALICE, BOB, VALIDATOR, LiveApi

NETUID = 24


@dataclass
class Chain:
    uids: dict[str, int]
    sent: list[Any] = field(default_factory=list)
    signers: list[str] = field(default_factory=list)
    token_symbols: dict[int, str] = field(default_factory=dict)
    head: int = 1000

    def balance(self, rao: int, netuid: int = 0) -> Any:
        return bt.Balance.from_rao(rao)

    async def connect(self) -> None: ...

    async def close(self) -> None: ...

    async def block_number(self) -> int:
        return self.head

    async def block_hash(self, block: int | None = None) -> str:
        return "0x00"

    async def block_time(self) -> float:
        return 0.01

    async def query(self, module: str, name: str, params: list[Any], **_: Any) -> Any:
        return self.uids.get(params[1]) if name == "Uids" else None

    async def compose(self, call: Any) -> Any:
        return call

    async def estimate_fee(self, call: Any, keypair: Any) -> Any:
        return bt.Balance.from_rao(1)

    async def submit(self, call: Any, keypair: Any, **_: Any) -> Any:
        self.sent.append(call)
        self.signers.append(keypair.ss58_address)
        return bt.ExtrinsicResult(success=True, message="included")

    async def query_map(self, *_: Any, **__: Any) -> list[Any]:
        return []


def send(chain: Chain, wallets: Path, shares: Mapping[str, float]) -> Any:
    client = bt.SyncClient("ws://127.0.0.1:1", substrate=chain)  # type: ignore[arg-type]
    with client:
        return submit_weights(client, NETUID, "validator", "default", str(wallets), shares)


def test_the_sdk_sets_the_shares_of_registered_hotkeys(tmp_path: Path) -> None:
    validator = create_throwaway(tmp_path, "validator").hotkey
    chain = Chain({validator: 0, ALICE.hotkey: 7, BOB.hotkey: 3})
    shares = {ALICE.hotkey: 0.6, BOB.hotkey: 0.25, VALIDATOR.hotkey: 0.10}
    assert send(chain, tmp_path, shares) == {ALICE.hotkey: 7, BOB.hotkey: 3}
    ((call,), signers) = (chain.sent, chain.signers)
    assert signers == [validator]
    values = call.params if hasattr(call, "params") else dict(call)
    assert (values["netuid"], values["dests"]) == (NETUID, [3, 7])
    light, heavy = values["weights"]
    assert (heavy, light / heavy) == (65535, pytest.approx(0.25 / 0.6, abs=1e-4))
    nobody = Chain({validator: 0})
    assert (send(nobody, tmp_path, shares), nobody.sent) == ({}, [])


def test_shares_depend_only_on_the_rank() -> None:
    rows = [Weight(uid=n, hotkey=key, weight=9.0) for n, key in enumerate("ABCADE")]
    assert shares_of(rows) == pytest.approx({"A": 0.65, "B": 0.25, "C": 0.10})
    assert shares_of([]) == {}


class Recorder:
    """Records weights, or raises `fault`."""

    def __init__(self) -> None:
        self.set: list[dict[str, float]] = []
        self.fault: ChainUnreachable | None = None

    def __call__(self, shares: Mapping[str, float]) -> dict[str, int]:
        if self.fault:
            raise self.fault
        self.set.append(dict(shares))
        return dict.fromkeys(shares, 1)


def test_a_finished_round_is_finalized_and_its_weights_are_set(api: LiveApi) -> None:
    for key, speed in ((ALICE, 10.0), (BOB, 20.0)):
        api.judged(key, speed)
    chain = Recorder()
    setter = WeightSetter(ValidatorApi(api.url, VALIDATOR), chain, 3600.0, api.clock)
    shares = {BOB.hotkey: 0.6, ALICE.hotkey: 0.25}
    # The round runs; it is over; nothing changes; an hour passes, twice.
    for seconds, times in ((0, 0), (49 * 3600, 1), (0, 1), (3599, 1), (1, 2), (3601, 3)):
        api.clock.now += seconds
        setter.run_once()
        assert chain.set == [shares] * times


def finalized(api: LiveApi) -> ValidatorApi:
    """Return a client of an API after a first round that Alice has won."""
    api.judged(ALICE, 10.0)
    client = ValidatorApi(api.url, VALIDATOR)
    client.finalize_round(client.current_round().id)
    client.finalize_round(1)  # already finalized
    return client


def test_rejected_weights_are_sent_again_later(api: LiveApi) -> None:
    chain = Recorder()
    chain.fault = ChainUnreachable("no answer in 180 s")
    setter = WeightSetter(finalized(api), chain, 3600.0, api.clock)
    setter.run_once()
    chain.fault = None
    for seconds, sent in ((0, []), (599, []), (1, [{ALICE.hotkey: 0.6}])):
        api.clock.now += seconds
        setter.run_once()
        assert chain.set == sent


def test_without_a_chain_weights_are_logged_once_per_interval(api: LiveApi) -> None:
    setter = WeightSetter(finalized(api), None, 3600.0, api.clock)
    with capture_logs() as lines:
        for seconds in (0, 1, 3598, 1):
            api.clock.now += seconds
            setter.run_once()
    shown = [(line["shares"], line["chain"]) for line in lines if line["event"] == "weights"]
    assert shown == 2 * [({ALICE.hotkey: 0.6}, "disabled")]


def test_changed_weights_are_set_at_once(api: LiveApi) -> None:
    chain = Recorder()
    setter = WeightSetter(ValidatorApi(api.url, VALIDATOR), chain, 1e9, api.clock)
    for key, speed in ((ALICE, 10.0), (BOB, 20.0)):
        api.judged(key, speed)
        api.clock.now += 49 * 3600
        setter.run_once()
        setter.run_once()
    assert chain.set == [{ALICE.hotkey: 0.6}, {BOB.hotkey: 0.6}]
