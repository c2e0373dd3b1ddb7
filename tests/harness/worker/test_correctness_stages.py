"""The inputs of the correctness check, and its behaviour if memory is short.

tests/adversarial has a wrong kernel for each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.sample import Correctness
from harness.worker import correctness as module
from harness.worker.chain import drawn
from harness.worker.compare import LIMITS, Checker
from harness.worker.correctness import check_correctness, compare_layer
from harness.worker.failures import WorkerError
from harness.worker.subject.serve import InProcessSubject
from quasar_kernels.reference import quasar_chunked
from tests.harness import honest

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MEASURED = 64
"""Length of the sample that the check precedes, in tokens."""

WIDTH = 512
"""Values of a token in all heads together."""


def exact(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Compute the operator quickly."""
    o, state = quasar_chunked(q, k, v, beta, initial_state)
    return o.to(q.dtype), state


class RecordingSubject(InProcessSubject):
    """An honest subject that records its inputs; `spoil` changes its tensors after a call."""

    def __init__(self) -> None:
        super().__init__(exact, honest.QuasarAttention, CPU)
        self.operated: list[dict[str, Tensor]] = []
        self.spoil: Callable[[dict[str, Tensor]], None] = lambda held: None

    def operate(self, *, initial: bool = False, final: bool = False) -> dict[str, Tensor]:
        self.operated.append({name: self._held[name].clone() for name in ("q", "k", "v", "beta")})
        result = super().operate(initial=initial, final=final)
        self.spoil(self._held)
        return result


def run(subject: RecordingSubject, seed: int = 19) -> Correctness:
    return check_correctness(subject, MEASURED, CPU, source_digest="s", seed=seed)


@pytest.fixture(scope="module")
def result() -> tuple[RecordingSubject, Correctness]:
    """A subject after a check, and the check's result."""
    subject = RecordingSubject()
    return subject, run(subject)


@pytest.fixture
def passed(result: tuple[RecordingSubject, Correctness]) -> RecordingSubject:
    """A subject that has passed the check."""
    assert result[1].passed
    return result[0]


def lengths_of(subject: RecordingSubject) -> set[int]:
    return {inputs["q"].shape[1] for inputs in subject.operated}


def test_three_lengths_of_each_check_are_secret(passed: RecordingSubject) -> None:
    fixed = {1, 65, 257, 512, MEASURED, 600, 300, 1000}
    secret = lengths_of(passed) - fixed
    assert fixed <= lengths_of(passed)
    assert len(secret) == 3  # the longest has heads of tiny beta
    assert module.SLOW_LENGTH <= max(secret) < 2 * module.SLOW_LENGTH
    other = RecordingSubject()
    module._Stages(Checker.draw(CPU, 20), other).lengths(MEASURED)
    assert not secret & lengths_of(other)


def test_inputs_are_like_those_of_a_layer(passed: RecordingSubject) -> None:
    """The step sizes are softplus(log u) with u from 1 to 16; q, k and v are outputs of a SiLU."""
    for inputs in passed.operated:
        beta = inputs["beta"]
        if inputs["q"].shape[1] >= module.SLOW_LENGTH:
            assert float(beta.min()) == pytest.approx(module.SLOWEST)
            continue
        assert 0.69 < float(beta.min()) <= float(beta.max()) < 2.84  # log 2 and log 17
        assert float(inputs["q"].min()) >= -0.279  # the least value of x * sigmoid(x)
        assert float(inputs["k"].abs().max()) < 4
    (one,) = (inputs for inputs in passed.operated if inputs["q"].shape[1] == 1)
    assert bool(one["k"].any())  # with a single key of zeros, the outputs would be zeros
    zeros = [inputs for inputs in passed.operated if not inputs["k"].any(-1).all()]
    assert len(zeros) > 3  # for a key of zeros, alpha would be 0 / 0


def test_keys_are_correlated_once_and_repeated_once(passed: RecordingSubject) -> None:
    keys = [inputs["k"] for inputs in passed.operated if inputs["k"].shape[1] == 512]
    repeated, correlated, independent = sorted(
        float(k.std(1).norm() / k.mean(1).norm()) for k in keys
    )
    assert repeated < 1e-6
    assert correlated == pytest.approx(0.1, rel=0.02)
    assert independent > 1


def test_changed_inputs_are_found_in_tensors_that_are_compared_in_part(monkeypatch):
    monkeypatch.setattr(module, "ORACLE_LENGTH", 16)
    subject = RecordingSubject()

    def spoil(held: dict[str, Tensor]) -> None:
        if held["q"].shape[1] == 65:
            held["k"].data[:, 40] += 1

    subject.spoil = spoil
    checker = Checker.draw(CPU, 19)
    module._Stages(checker, subject).lengths(MEASURED)
    (failed,) = (check for check in checker.worst.values() if not check.passed)
    assert (failed.name, failed.where) == ("operator: inputs changed", "k, 65 tokens")


def test_a_gradient_of_another_shape_counts_as_zero() -> None:
    subject = RecordingSubject()
    honest_gradients = subject.gradients

    def misshapen() -> dict[str, Tensor]:
        gradients = honest_gradients()
        return {**gradients, "o_proj.weight": gradients["o_proj.weight"].repeat(2, 1)}

    subject.gradients = misshapen  # type: ignore[method-assign]
    checker = Checker.draw(CPU, 1)
    module._Stages(checker, subject).gradients()
    worst = checker.worst["gradients: cosine"]
    assert (worst.where, worst.value, worst.passed) == ("o_proj.weight", 0, False)


def test_a_replaced_function_fails_and_is_named() -> None:
    """It is named first, because a verdict has room for few failures."""
    for at_import in (True, False):
        subject = RecordingSubject()
        subject._operator = lambda q, *_, **__: (torch.zeros_like(q), None)  # fails early
        answers = iter([{"names": ["torch.mm"] if at_import else []}, {"names": ["torch.mm"]}])
        subject.tampered = lambda answers=answers: next(answers)  # type: ignore[method-assign, misc]
        failed = run(subject).failed
        assert (failed[0].name, failed[0].where) == ("functions replaced", "torch.mm")
        assert (len(failed) == 1) == at_import


def test_a_layer_without_a_weight_is_refused_by_name() -> None:
    class Fused(honest.QuasarAttention):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            del self.v_proj

    subject = InProcessSubject(exact, Fused, CPU)
    with pytest.raises(WorkerError, match=r"lacks the weight v_proj\.weight \[512, 512\]") as error:
        module._Stages(Checker.draw(CPU, 1), subject).layer(64)
    assert error.value.kind == "gate"


# ---- slow heads ------------------------------------------------------------------------------

PIECE, OVERLAP = 4096, 384


def pieces(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Compute overlapping pieces without passing the state on."""
    o = []
    for start in range(0, q.shape[1], PIECE):
        before = max(0, start - OVERLAP)
        q_, k_, v_ = (x[:, before : start + PIECE] for x in (q, k, v))
        o.append(quasar_chunked(q_, k_, v_, beta, dtype=torch.float32)[0][:, start - before :])
    return torch.cat(o, 1), None


class Pieces(honest.QuasarAttention):
    """A layer that computes pieces, although its operator is right."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(honest, "chunk_quasar", pieces)
            return super().forward(x, **options)


def test_pieces_without_a_state_exceed_the_limits_of_any_precision() -> None:
    tokens, checker = 5000, Checker.draw(CPU, 3)
    bf16 = LIMITS[torch.bfloat16]
    slow = module._layer_like(checker, tokens) | {"beta": module._slow_heads()}
    stages = module._Stages(checker, InProcessSubject(pieces, Pieces, CPU))
    stages._compare(slow, "here", "operator of slow heads")
    stages.slow_layer(tokens)
    errors = {name: check.value for name, check in checker.worst.items() if "worst" in name}
    operator, layer = (
        errors[f"{w} of slow heads: error of the worst eighth"] for w in ("operator", "layer")
    )
    assert (operator or 0.0) > 4 * bf16.operator, errors
    assert (layer or 0.0) > 4 * bf16.layer, errors


def test_the_operator_and_the_layer_of_slow_heads_are_compared_at_the_longest_length(result):
    wheres = {check.name: check.where for check in result[1].checks}
    assert wheres["layer of slow heads: relative RMS error"] == f"{MEASURED} tokens"
    subject = RecordingSubject()
    module._Stages(Checker.draw(CPU, 1), subject).lengths(3 * module.SLOW_LENGTH)
    slow = [one for one in subject.operated if float(one["beta"].min()) < 0.1]
    assert max(one["q"].shape[1] for one in slow) == 3 * module.SLOW_LENGTH
    for one in slow:
        square = one["k"].double().square().sum(-1).mean()
        memory = 64 / float(-torch.expm1(-one["beta"].min() * square))
        assert memory > 10_000, memory


# ---- memory ----------------------------------------------------------------------------------


def test_the_float64_oracle_leaves_a_third_of_the_free_memory(monkeypatch):
    free = 1.5 * 12 * 8 * 100_000 * WIDTH
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 10**15))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert module._longest(CUDA, 100_000) == 100_000
    assert module._longest(CUDA, 100_001) == 65536
    assert module._longest(CPU, 100_001) == 100_001


@pytest.mark.parametrize(("room", "compared"), [(True, 48), (False, 40)])
def test_long_layers_are_compared_in_fp32_as_far_as_memory_allows(monkeypatch, room, compared):
    """Outputs that are not compared must be finite."""
    oracles: list[tuple[int, torch.dtype]] = []

    def oracle(weights: object, x: Tensor, *, dtype: torch.dtype, **_: int) -> Tensor:
        oracles.append((x.shape[1], dtype))
        return x

    monkeypatch.setattr(module, "LAYER_EXACT", 40)
    monkeypatch.setattr(module, "_fits", lambda *_: room)
    monkeypatch.setattr(module, "quasar_layer", oracle)
    x, checker = drawn((1, 48, WIDTH), 7, CPU), Checker.draw(CPU, 1)
    y = x.clone()
    y[0, 45, :3] = torch.tensor([torch.nan, torch.inf, 1e9])
    compare_layer(checker, "here", {}, x, y)
    assert oracles == [(compared, torch.float32)]
    failed = {check.name: check.value for check in checker.worst.values() if not check.passed}
    if room:
        assert "layer: relative RMS error" in failed
    else:
        assert failed == {"layer: values not finite": 2}
