"""The chain of a proof, and the outputs that its verification accepts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.worker import own_layer, proof
from harness.worker.chain import SCALED, STEP, ChainMaps, Link, drawn, fill_keys
from harness.worker.compare import Checker
from harness.worker.failures import WorkerError
from harness.workload import WORKLOAD
from quasar_kernels.reference import quasar_layer, quasar_recurrence

CPU = torch.device("cpu")
CHANNELS = WORKLOAD.hidden_size
Change = Callable[[Tensor], Tensor]


def layer(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Compute the layer in float64, token by token."""
    heads: Any = {"num_heads": WORKLOAD.num_heads, "head_dim": WORKLOAD.head_dim}
    return quasar_layer(weights, x, operator=quasar_recurrence, **heads)


def test_segments_have_the_outputs_of_the_whole_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_layer, "SEGMENT", 2 * 64)
    weights, x = own_layer.draw_weights(CPU), drawn((1, 200, CHANNELS), 1, CPU)
    factors = torch.rand(2, CHANNELS)
    parts = list(own_layer.outputs(weights, x, factors))
    assert [part.shape[1] for part in parts] == [64, 64, 64, 8]
    wanted = layer(weights, x * factors[:, None])
    assert float((torch.cat(parts, 1) - wanted).abs().max()) < 1e-5
    maps = ChainMaps.draw(200, 1.0, 2, CPU)
    sums = torch.stack([maps.sums(part, 2 * number) for number, part in enumerate(parts)])
    assert torch.allclose(sums.sum(0), maps.sums(wanted.float()), atol=1e-3)


def test_a_link_scales_the_weights_by_the_referees_factors() -> None:
    weights = own_layer.draw_weights(CPU)
    true = [weights[name].clone() for name in SCALED]
    maps = ChainMaps.draw(512, 0.3, 3, CPU)
    link = Link(maps, [weights[name] for name in SCALED], 8)
    link.start(4, 3)
    keys, before = fill_keys(torch.empty(3, CHANNELS), 4), torch.zeros(1, CHANNELS)
    for call in range(3):
        factors = maps.factors(keys[call : call + 1], before)
        for name, weight in zip(SCALED, true, strict=True):
            assert torch.allclose(weights[name], weight * factors, atol=1e-6)
        y = 0.3 * drawn((1, 512, CHANNELS), 10 + call, CPU)
        link(y)
        before = maps.sums(y).round()
        assert torch.equal(link.digests[call], before[0])


def test_factors_depend_on_every_number_of_a_digest_and_on_the_key() -> None:
    maps, key = ChainMaps.draw(512, 0.3, 5, CPU), torch.zeros(1, CHANNELS)
    digest = torch.randint(-8, 9, (1, CHANNELS)).float()
    factors = maps.factors(key, digest)
    assert abs(float(factors.mean())) < 0.2
    assert abs(float(factors.var()) - 1) < 0.2
    for place in range(0, CHANNELS, 37):
        other = digest.clone()
        other[0, place] += 1
        correlation = torch.corrcoef(torch.cat((factors, maps.factors(key, other))))[0, 1]
        assert abs(float(correlation)) < 0.25, place
    # exact in fp32 for any order of the sum
    exact = (digest.double() @ maps.mixing.T.double()).remainder(1)
    assert torch.equal(maps.fractions(key[0], digest[0]).double(), exact[0])


@pytest.fixture(autouse=True)
def known_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same weights and noise in each run, so that no test passes or fails by chance."""
    seeds = itertools.count()
    monkeypatch.setattr(own_layer, "secret_seed", lambda: next(seeds))
    torch.manual_seed(0)


def verification_error(change: Change, dtype: torch.dtype, length: int, calls: int) -> str:
    """Return why verification refuses a chain with changed outputs; "" if it accepts the chain."""
    weights, x = own_layer.draw_weights(CPU), drawn((1, length, CHANNELS), 6, CPU)
    size = own_layer.output_size(weights, CPU)
    maps = ChainMaps.draw(length, size, 7, CPU)
    keys, digests = fill_keys(torch.empty(calls, CHANNELS), 8), [torch.zeros(CHANNELS)]
    for call in range(calls):
        factors = maps.factors(keys[call : call + 1], digests[-1][None])
        y = torch.cat(list(own_layer.outputs(weights, x, factors)), 1)
        digests.append(maps.sums(change(y)).round()[0])
    chain = proof.Chain(8, torch.stack(digests[1:]).to(torch.int8), 1.0)
    checker = Checker(CPU, dtype, torch.Generator())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checker, "draw", lambda _device, **_: checker)
        try:
            proof._verify(maps, weights, x, chain)
        except WorkerError as error:
            return str(error)
    return ""


def noisy(share: float) -> Change:
    """Return a change that adds an error of this share of the outputs' size."""
    return lambda y: y + share * y.square().mean().sqrt() * torch.randn_like(y)


def without(share: float) -> Change:
    """Return a change that replaces this share of the tokens by the token before each."""

    def change(y: Tensor) -> Tensor:
        places = torch.arange(0, y.shape[1], round(1 / share))
        y = y.clone()
        y[:, places] = y[:, places - 1]
        return y

    return change


BF16, FP32 = torch.bfloat16, torch.float32

ACCEPTED: list[tuple[Change, torch.dtype]] = [
    (noisy(1e-5), FP32),
    (lambda y: y.bfloat16().float(), BF16),
    (noisy(0.009), BF16),
]
REFUSED: list[tuple[Change, torch.dtype]] = [
    (noisy(1e-3), FP32),
    (without(1 / 1024), FP32),
    (noisy(0.03), BF16),
    (without(0.004), BF16),
    (lambda y: torch.cat((y[..., :508], y[..., :4]), -1), BF16),
]


@pytest.mark.parametrize(("change", "dtype"), ACCEPTED)
def test_outputs_within_the_error_of_a_layer_are_accepted(change, dtype):
    assert verification_error(change, dtype, length=1024, calls=4) == ""


@pytest.mark.parametrize(("change", "dtype"), REFUSED)
def test_outputs_with_larger_errors_are_refused(change: Change, dtype: torch.dtype) -> None:
    error = verification_error(change, dtype, length=1024, calls=8)
    assert "the timed calls did not compute the layer: digests" in error


def test_a_digest_cannot_be_guessed() -> None:
    """Each of its 512 numbers has more than 3.3 bits."""
    weights, length = own_layer.draw_weights(CPU), 1024
    x = drawn((1, length, CHANNELS), 9, CPU)
    maps = ChainMaps.draw(length, own_layer.output_size(weights, CPU), 10, CPU)
    y = torch.cat(list(own_layer.outputs(weights, x, torch.ones(1, CHANNELS))), 1)
    spread = float(maps.sums(y).std())
    assert 0.6 / STEP < spread < 0.9 / STEP
    assert math.log2(spread * math.sqrt(2 * math.pi * math.e)) > 3.3


class Answers:
    """A subject that answers without calling a layer."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.ended = False

    def end(self) -> None:
        self.ended = True

    def ask(self, op: str, *, seed: int, calls: int) -> tuple[dict[str, object], dict[str, Tensor]]:
        self.calls.append(calls)
        return {}, {"digests": torch.zeros(calls, CHANNELS, dtype=torch.int8)}


@pytest.mark.parametrize(("device", "length", "most"), [("cpu", 512, 256), ("cuda", 512, 8192)])
def test_chains_have_no_more_calls_than_can_be_verified(device, length, most):
    subject = Answers()
    proof._best_chain(subject, length, torch.device(device))  # type: ignore[arg-type]
    assert max(subject.calls) == most


@pytest.mark.parametrize(
    ("device", "length", "enough", "rests"),
    [
        ("cuda", 16_384, 0.0, True),
        ("cuda", 512, 0.0, False),
        ("cuda", 16_384, 1e-9, False),
        ("cpu", 16_384, 0.0, False),
    ],
)
def test_the_gpu_rests_before_long_chains_of_a_fork(monkeypatch, device, length, enough, rests):
    """It also rests while the process of the public loop starts."""
    pauses: list[float] = []
    monkeypatch.setattr("harness.worker.proof.time.sleep", pauses.append)
    proof._best_chain(Answers(), length, torch.device(device), enough)  # type: ignore[arg-type]
    assert set(pauses) == {proof.REST if rests else 0.0}


class Timed(Answers):
    """A subject whose calls advance a clock: by `alone` seconds, or in chains by `linked`."""

    def __init__(self, alone: float, linked: float, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now, self.seconds = 0.0, {"repeat": alone, "chain": linked}
        monkeypatch.setattr("harness.worker.proof.time.monotonic", lambda: self.now)
        monkeypatch.setattr(proof, "verify", lambda *_, **__: None)
        monkeypatch.setattr(proof, "draw_weights", lambda _: {})
        monkeypatch.setattr(proof, "output_size", lambda *_: 1.0)

    def ask(self, op: str, *_: Any, **fields: Any) -> tuple[dict[str, object], dict[str, Tensor]]:
        if op == "prepare":
            return {"vram_bytes": 0, "first_call_seconds": 0.0}, {}
        self.now += fields["calls"] * self.seconds[op]
        return super().ask(op, seed=0, calls=fields["calls"])


@pytest.mark.parametrize(
    ("device", "length", "alone", "linked", "refused"),
    [
        ("cuda", 16_384, 1.0, 1.2, False),
        ("cuda", 16_384, 1.0, 1.4, True),
        ("cuda", 4096, 1.0, 1.9, False),  # the host launches the link's kernels between calls
        ("cuda", 4096, 1.0, 2.1, True),
        ("cpu", 512, 1.0, 2.9, False),
        ("cpu", 512, 1.0, 3.1, True),
        ("cuda", 16_384, 1.6, 1.9, False),  # the host has become busier
        ("cuda", 16_384, 1.4, 1.9, True),
        ("cuda", 4096, 0.1, 2.1, True),  # repeated calls do not compute
        ("cuda", 4096, 9.0, 7.9, False),
        ("cuda", 4096, 9.0, 8.1, True),  # only the calls of the loop did not compute
    ],
)
def test_calls_that_take_too_long_in_a_chain_are_refused(
    monkeypatch, device, length, alone, linked, refused
):
    """The factors are relative to the seconds of a call in the loop."""
    subject: Any = Timed(0.001 * alone, 0.001 * linked, monkeypatch)
    error = pytest.raises(WorkerError, match="did not compute the layer")
    with error if refused else nullcontext():
        proof.cross_check(subject, length, torch.device(device), per_call=0.001)
    assert subject.ended


def test_one_undisturbed_chain_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    class Calming(Timed):
        def ask(self, op: str, *_: Any, **fields: Any) -> Any:
            if op == "repeat":
                self.seconds["chain"] = 0.0012
            return super().ask(op, **fields)

    subject: Any = Calming(0.001, 0.002, monkeypatch)
    proof.cross_check(subject, 16_384, torch.device("cuda"), per_call=0.001)


class Remembering(Timed):
    """Its calls compute only after a change of the weights; the host stalls during one of them."""

    def __init__(self, stalled: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(0.0005, 0.010, monkeypatch)
        self.changed, self.repeats, self.stalled = False, 0, stalled

    def ask(self, op: str, *_: Any, **fields: Any) -> Any:
        if op == "repeat":
            self.repeats += 1
            computes = self.seconds["chain"] if self.changed else 0.0
            self.now += computes + (0.1 if self.repeats == self.stalled else 0.0)
        self.changed = op == "chain"
        return super().ask(op, **fields)


@pytest.mark.parametrize("stalled", [0, 1, 2, 3])
def test_remembered_outputs_are_refused_on_a_busy_host(stalled, monkeypatch):
    """Neither the call that computes new weights' output nor a stall makes the others slow."""
    subject: Any = Remembering(stalled, monkeypatch)
    with pytest.raises(WorkerError, match=r"0\.50 ms alone afterwards, and 10\.00 ms in a chain"):
        proof.cross_check(subject, 512, CPU, per_call=0.001)
