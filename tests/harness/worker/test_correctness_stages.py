"""The stages of the correctness check, and where its limits lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.sample import Correctness
from harness.worker import correctness as module
from harness.worker.compare import Checker
from harness.worker.correctness import check_correctness, compare_layer
from harness.worker.inputs import drawn
from harness.worker.subject.serve import InProcessSubject
from quasar_kernels.reference import quasar_chunked
from tests.harness import honest

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MEASURED = 64
"""Tokens, of the sample after these checks."""

WIDTH = 512
"""Values of a token in all heads together."""


def exact(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Compute the operator fast, so that a test of the gate costs little."""
    o, state = quasar_chunked(q, k, v, beta, initial_state)
    return o.to(q.dtype), state


class Watched(InProcessSubject):
    """An honest subject that notes what it is asked; `spoil` changes what it holds."""

    def __init__(self, operator: Callable[..., Any] = exact) -> None:
        super().__init__(operator, honest.QuasarAttention, CPU)
        self.operated: list[dict[str, Tensor]] = []
        self.states: list[tuple[bool, bool]] = []
        self.fetched: list[tuple[int, int | None]] = []
        self.forwards: list[tuple[Tensor, Tensor]] = []
        self.spoil: Callable[[dict[str, Tensor]], None] = lambda held: None

    def operate(self, *, initial: bool = False, final: bool = False) -> dict[str, Tensor]:
        self.operated.append({name: self._held[name].clone() for name in ("q", "k", "v", "beta")})
        self.states.append((initial, final))
        found = super().operate(initial=initial, final=final)
        self.spoil(self._held)
        return found

    def fetch(self, names: Sequence[str], rows: Sequence[int] | None = None) -> dict[str, Tensor]:
        length = self._held[names[0]].shape[1]
        self.fetched.append((length, None if rows is None else len(rows)))
        if rows is not None:
            assert 0 <= min(rows) <= max(rows) < length
        return super().fetch(names, rows)

    def forward(self) -> dict[str, Tensor]:
        found = super().forward()
        self.forwards.append((self._held["x"].clone(), found["y"]))
        return found


def run(subject: Watched, seed: int | None = 19) -> Correctness:
    return check_correctness(subject, MEASURED, CPU, source_digest="s", seed=seed)


@pytest.fixture(scope="module")
def green() -> Watched:
    """A subject that passed; what it noted is read by several tests."""
    subject = Watched()
    assert run(subject).passed
    return subject


def lengths_of(subject: Watched) -> set[int]:
    return {called["q"].shape[1] for called in subject.operated}


def test_two_lengths_of_each_gate_are_secret(green: Watched) -> None:
    """A kernel that knows the gate's lengths must not know all of them."""
    fixed = {1, 65, 257, 512, MEASURED, 600, 300, 1000}
    secret = lengths_of(green) - fixed
    assert fixed <= lengths_of(green)
    assert len(secret) == 3  # one of slow heads, which is longer
    assert module.SLOW_LENGTH <= max(secret) < 2 * module.SLOW_LENGTH
    other = Watched()
    assert run(other, seed=20).passed
    assert len(lengths_of(other) - fixed) == 3
    assert not secret & lengths_of(other)


def test_inputs_are_those_that_the_layer_makes(green: Watched) -> None:
    """The step sizes are softplus(log u) with u from 1 to 16; q, k and v come out of a SiLU."""
    for called in green.operated:
        beta = called["beta"]
        if called["q"].shape[1] >= module.SLOW_LENGTH:
            assert float(beta.min()) == pytest.approx(module.SLOWEST)
            continue
        assert 0.69 < float(beta.min()) <= float(beta.max()) < 2.84  # log 2 and log 17
        assert float(called["q"].min()) >= -0.279  # the least value of x * sigmoid(x)
        assert float(called["k"].abs().max()) < 4  # the deviation of what comes into it is 0.5
    checker = Checker.draw(CPU, 1)
    betas = torch.cat([module._layer_like(checker, 1)["beta"] for _ in range(2000)])
    uniform = (betas.exp() - 2) / 15  # they fill that range evenly
    assert abs(float(uniform.min())) < 0.01
    assert float(uniform.max()) == pytest.approx(1, abs=0.01)
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.01)
    long = max(green.operated, key=lambda called: called["q"].shape[1])
    (one,) = (called for called in green.operated if called["q"].shape[1] == 1)
    assert bool(one["k"].any())  # a lone key of zeros would leave nothing to compare
    half = 0.5 * torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    expected = float((half * half.sigmoid()).std())
    assert float(long["q"].std()) == pytest.approx(expected, rel=0.02)


def test_keys_are_nearly_and_quite_alike_in_two_of_the_calls(green: Watched) -> None:
    keys = [called["k"] for called in green.operated if called["k"].shape[1] == 512]
    spread = {float(k.std(1).norm() / k.mean(1).norm()): k.mean(1) for k in keys}
    repeated, correlated, independent = sorted(spread)
    assert repeated < 1e-6
    assert correlated == pytest.approx(0.1, rel=0.02)
    assert independent > 1
    for found in (repeated, correlated):  # what they have in common comes out of a SiLU as well
        assert -0.3 < float(spread[found].min()) < -0.25
        assert 0.8 < float(spread[found].max()) < 2
        assert float((spread[found][:, 0] - spread[found][:, 1]).abs().max()) > 0.5  # of heads


def test_values_of_a_burst_are_a_thousand_times_larger(green: Watched) -> None:
    (v,) = [called["v"] for called in green.operated if called["v"].shape[1] == 600]
    loud, quiet = v[:, :20].std(), v[:, 20:].std()
    assert float(loud / quiet) == pytest.approx(1000, rel=0.05)
    assert float(v[:, 20].abs().max()) < 10
    assert float(v[:, 19].abs().max()) > 100


def test_states_are_asked_for_by_their_own_stage_alone(green: Watched) -> None:
    """The layer calls the operator without, which is another way through a kernel."""
    at = {i for i, called in enumerate(green.operated) if called["q"].shape[1] == 257}
    assert [both for both in green.states if any(both)] == [(False, True), (True, True)]
    assert {i for i, both in enumerate(green.states) if any(both)} <= at
    assert green.states.count((False, False)) > 10


def test_a_trace_of_a_burst_is_found_in_the_last_64_tokens() -> None:
    def traced(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        o, state = exact(q, k, v, *rest, **options)
        if q.shape[1] == 600:
            o[:, -64] += 0.5
        return o, state

    (failed, *_) = run(Watched(traced)).failed
    assert failed.name.startswith("operator behind a burst")
    assert failed.limit == 2e-4


def test_the_future_alone_changes_for_the_test_of_causality(green: Watched) -> None:
    for length in (300, 1000):
        before, after = (c for c in green.operated if c["q"].shape[1] == length)
        for name in "qkv":
            same = (before[name] == after[name]).all(-1).all(-1)[0]
            cut = int(same.sum())
            assert 1 <= cut < length
            assert bool(same[:cut].all())
        assert torch.equal(before["beta"], after["beta"])


def test_the_layer_sees_drawn_inputs_at_two_lengths_twice_each(green: Watched) -> None:
    shapes = [tuple(x.shape) for x, _ in green.forwards]
    assert shapes == [(1, length, WIDTH) for length in (257, 257, MEASURED, MEASURED)]
    for (first, _), (second, _) in zip(green.forwards[::2], green.forwards[1::2], strict=True):
        assert not torch.equal(first, second)


def test_long_tensors_are_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ORACLE_LENGTH", 257)
    subject = Watched()
    assert run(subject).passed
    whole = {length for length, rows in subject.fetched if rows is None}
    parts = {length: rows for length, rows in subject.fetched if rows is not None}
    assert {1, 65, 257} <= whole
    assert max(whole) == 257
    assert parts[512] == 4096
    assert min(parts) > 257


@pytest.mark.parametrize(("name", "longest_whole"), [("q", 16), ("k", 65536), ("v", 16)])
def test_inputs_that_a_subject_changes_are_found_whole_or_in_part(monkeypatch, name, longest_whole):
    monkeypatch.setattr(module, "ORACLE_LENGTH", longest_whole)
    subject = Watched()

    def spoil(held: dict[str, Tensor]) -> None:
        if held["q"].shape[1] == 65:
            held[name].data[:, 40] += 1

    subject.spoil = spoil
    failed = run(subject).failed
    assert {check.where for check in failed} == {f"{name}, 65 tokens"}
    assert {check.name for check in failed} == {"operator: inputs changed"}


@pytest.mark.parametrize(("rows", "copies"), [(WIDTH, 2), (WIDTH - 1, 1)])
def test_a_gradient_of_another_shape_is_none(rows: int, copies: int) -> None:
    subject = Watched()
    honest_gradients = subject.gradients

    def misshapen() -> dict[str, Tensor]:
        found = honest_gradients()
        return {**found, "o_proj.weight": found["o_proj.weight"][:rows].repeat(copies, 1)}

    subject.gradients = misshapen  # type: ignore[method-assign]
    checker = Checker.draw(CPU, 1)
    module._Stages(checker, subject).gradients()
    worst = checker.worst["gradients: cosine"]
    assert (worst.where, worst.value, worst.passed) == ("o_proj.weight", 0, False)


def test_one_function_that_was_replaced_fails_and_is_named() -> None:
    subject = Watched()
    subject.tampered = lambda: {"names": ["torch.mm"]}  # type: ignore[method-assign]
    (check,) = run(subject).failed
    assert (check.name, check.where, check.value) == ("functions replaced", "torch.mm", 1)


# ---- memory ----------------------------------------------------------------------------------


def free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(size), 10**15))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_a_third_of_the_free_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 300)
    assert [module._fits(CUDA, size) for size in (199, 200, 201)] == [True, True, False]
    assert module._fits(CPU, 10**15)


def test_the_float64_oracle_takes_twelve_tensors_of_all_heads(monkeypatch):
    tensors = 12 * 8 * 100_000 * WIDTH
    free(monkeypatch, 1.5 * tensors)
    assert module._longest(CUDA, 100_000) == 100_000
    assert module._longest(CUDA, 100_001) == 65536
    assert module._longest(CUDA, 1_000) == 1_000
    free(monkeypatch, 0)
    assert module._longest(CUDA, 1_000) == 1_000
    assert module._longest(CPU, 100_001) == 100_001


@pytest.mark.parametrize(
    ("length", "room", "dtype", "compared"),
    [
        (39, False, torch.float64, 39),
        (40, False, torch.float64, 40),
        (41, True, torch.float32, 41),
        (41, False, torch.float32, 40),
    ],
)
def test_the_layer_is_compared_exactly_up_to_a_length(monkeypatch, length, room, dtype, compared):
    """Beyond it the oracle is fp32, all of it where its 20 tensors fit, else the beginning."""
    sizes: list[int] = []
    oracles: list[tuple[int, torch.dtype]] = []

    def fits(device: torch.device, size: int) -> bool:
        sizes.append(size)
        return room

    def oracle(weights: object, x: Tensor, *, dtype: torch.dtype, **_: int) -> Tensor:
        oracles.append((x.shape[1], dtype))
        return x

    monkeypatch.setattr(module, "LAYER_EXACT", 40)
    monkeypatch.setattr(module, "_fits", fits)
    monkeypatch.setattr(module, "quasar_layer", oracle)
    x, checker = drawn((1, length, WIDTH), 7, CPU), Checker.draw(CPU, 1)
    compare_layer(checker, "here", {}, x, x)
    assert checker.passed
    assert oracles == [(compared, dtype)]
    assert sizes == [20 * 4 * length * WIDTH] * (length > 40)
    assert ("layer: values not finite" in checker.worst) is (compared < length)


def test_what_is_not_compared_has_to_be_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAYER_EXACT", 40)
    monkeypatch.setattr(module, "_fits", lambda *_: False)
    monkeypatch.setattr(module, "quasar_layer", lambda weights, x, **_: x)
    x, checker = drawn((1, 48, WIDTH), 7, CPU), Checker.draw(CPU, 1)
    y = x.clone()
    y[0, 45, :3] = torch.tensor([torch.nan, torch.inf, 1e9])
    compare_layer(checker, "here", {}, x, y)
    (failed,) = [check for check in checker.worst.values() if not check.passed]
    assert (failed.name, failed.value, failed.limit) == ("layer: values not finite", 2, 0)
