"""The correctness check of an honest layer, and the validator's loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.sample import Correctness
from harness.worker.chain import drawn
from harness.worker.compare import Checker, figures
from harness.worker.correctness import check_correctness
from harness.worker.failures import WorkerError
from harness.worker.subject.serve import InProcessSubject
from harness.worker.subject.timing import tampered, time_layer
from tests.harness import honest

CPU = torch.device("cpu")
Operator = Callable[..., tuple[Tensor, Tensor | None]]


def checked(operator: Operator = honest.chunk_quasar) -> Correctness:
    subject = InProcessSubject(operator, honest.QuasarAttention, CPU)
    return check_correctness(subject, 64, CPU, source_digest="s")


def test_an_honest_operator_and_layer_pass_with_all_figures() -> None:
    result = checked()
    assert result.passed, [str(check) for check in result.failed]
    assert (result.device, result.dtype, result.longest) == ("cpu", "float32", 512)
    errors = [c for c in result.checks if c.name.endswith("relative RMS error")]
    assert len(errors) == 8
    assert all(c.value is not None and 0 < c.value < 1e-5 for c in errors)


def test_each_check_draws_new_inputs() -> None:
    inputs: list[Tensor] = []

    def record(q: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        inputs.append(q.clone())
        return torch.zeros_like(q), None

    first, second = checked(record), checked(record)
    assert first.seed != second.seed
    assert not torch.equal(inputs[0], inputs[len(inputs) // 2])


def test_new_values_keep_the_memory_and_the_version_counter() -> None:
    subject = InProcessSubject(honest.chunk_quasar, honest.QuasarAttention, CPU)
    subject.put({"x": torch.zeros(1, 2, 3)})
    before = subject.fetch(("x",))["x"]
    version = before._version
    subject.put({"x": torch.ones(1, 2, 3)})
    assert float(before.sum()) == 6
    assert before._version == version
    for seed in (1, 2):
        subject.draw("x", (1, 2, 3), seed)
        assert torch.equal(before, drawn((1, 2, 3), seed, CPU))
        assert before._version == version


# ---- the validator's loop --------------------------------------------------------------------


class RecordsCalls(honest.QuasarAttention):
    calls: tuple[Any, ...] = ()

    def forward(self, x, **options):
        state = (x.shape, x.dtype, self.training, torch.is_grad_enabled())
        type(self).calls += (state,)
        return super().forward(x, **options)


def test_the_loop_on_a_cpu_is_the_validators() -> None:
    time_layer(RecordsCalls, 16, CPU)
    assert RecordsCalls.calls == (((1, 16, 512), torch.float32, True, False),) * 13


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_row_26_a_wrong_clock_is_detected(monkeypatch, speed):
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() * speed)
    assert tampered() == ["time.time"]

    def never_built(**_: Any) -> None:
        raise AssertionError("the loop began")

    with pytest.raises(WorkerError, match=r"replaced time\.time") as replaced:
        time_layer(never_built, 16, CPU)
    # also if the function is not replaced, but the system clock is set, which is a temporary fault
    monkeypatch.setattr("harness.worker.subject.timing.tampered", list)
    with pytest.raises(WorkerError, match="the system clock counted") as stepped:
        time_layer(honest.QuasarAttention, 16, CPU)
    assert (replaced.value.kind, stepped.value.kind) == ("gate", "crash")


# ---- figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "error", "passed"),
    [(0.25, 0.09, True), (0.25, 0.11, False), (2.0, 0.3, True), (2.0, 0.9, False)],
)
def test_the_largest_difference_may_grow_with_the_values(size, error, passed):
    """A bf16 error of 0.1 is usual for outputs behind large values, not for usual ones."""
    exact = torch.full((1, 512, 8, 64), size)
    actual = exact.clone()
    actual[0, 7, 3, 5] += error
    checker = Checker.draw(CPU)
    checker.dtype = torch.bfloat16
    checker.compare("operator", "512 tokens", actual, exact, checker.limits.operator)
    failed = [str(check) for check in checker.worst.values() if not check.passed]
    assert (not failed) == passed, checker.worst
    assert all("largest difference" in one for one in failed), failed


def test_figures_by_hand() -> None:
    expected = torch.ones(1, 16, 2)
    actual = expected.clone()
    actual[:, -2:] = 1.5  # the last eighth
    result = figures(actual, expected)
    assert result.worst_part == pytest.approx(0.5)
    assert result.relative_rms == pytest.approx(0.5 / 8**0.5)
    assert result.max_difference == pytest.approx(0.5)
    assert result.cosine == pytest.approx((28 + 6) / (32 * (28 + 9)) ** 0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_exceed_every_limit(bad: float) -> None:
    actual = torch.ones(1, 9, 2)
    actual[0, 4, 1] = bad
    result = figures(actual, torch.ones(1, 9, 2))
    assert not result.relative_rms < 1e300
    assert result.max_difference == float("inf")
    assert not result.cosine >= 0.999
