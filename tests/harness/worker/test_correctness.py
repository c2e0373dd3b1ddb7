"""The correctness check of an honest layer, and the validator's loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.sample import Correctness
from harness.worker.compare import figures
from harness.worker.correctness import check_correctness
from harness.worker.inputs import drawn
from harness.worker.subject.serve import InProcessSubject
from harness.worker.subject.timing import InvalidRunError, tampered, time_layer
from tests.harness import honest

CPU = torch.device("cpu")
Operator = Callable[..., tuple[Tensor, Tensor | None]]


def checked(operator: Operator = honest.chunk_quasar, layer: Any = None) -> Correctness:
    subject = InProcessSubject(operator, layer or honest.QuasarAttention, CPU)
    return check_correctness(subject, 64, CPU, source_digest="s")


def test_an_honest_operator_and_layer_pass_with_every_figure_on_record() -> None:
    result = checked()
    assert result.passed, [str(check) for check in result.failed]
    assert (result.device, result.dtype, result.longest) == ("cpu", "float32", 512)
    errors = [c for c in result.checks if c.name.endswith("relative RMS error")]
    assert len(errors) == 7
    assert all(c.value is not None and 0 < c.value < 1e-5 for c in errors)


def test_the_seed_is_secret_and_fresh() -> None:
    seen: list[Tensor] = []

    def remember(q: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        seen.append(q.clone())
        return torch.zeros_like(q), None

    first, second = checked(remember), checked(remember)
    assert first.seed != second.seed
    assert not torch.equal(seen[0], seen[len(seen) // 2])


def test_a_key_of_zeros_is_among_the_inputs() -> None:
    """A key of zeros is where alpha would be 0 / 0."""
    with_zeros = 0

    def look(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        nonlocal with_zeros
        with_zeros += int((k == 0).all(-1).all(-1).sum())
        return honest.chunk_quasar(q, k, *rest, **options)

    assert checked(look).passed
    assert with_zeros >= 3


def test_the_first_stage_that_is_red_is_the_last() -> None:
    result = checked(lambda q, *_rest, **_options: (torch.zeros_like(q), None))
    assert not result.passed
    assert {check.where for check in result.failed} == {"257 tokens, inputs rewritten unseen"}


def test_values_are_rewritten_in_place_and_unseen() -> None:
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


def test_both_sides_draw_the_same_values_in_new_memory_as_in_old() -> None:
    fresh, used = (
        InProcessSubject(honest.chunk_quasar, honest.QuasarAttention, CPU) for _ in range(2)
    )
    used.put({"x": torch.zeros(1, 700, 33)})
    for subject in (fresh, used):
        subject.draw("x", (1, 700, 33), 5)
    values = [drawn((1, 700, 33), 5, CPU), *(one.fetch(("x",))["x"] for one in (fresh, used))]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
    assert abs(float(values[0].std()) - 1) < 0.02
    assert not torch.equal(values[0], drawn((1, 700, 33), 6, CPU))


# ---- what the timed process checks -----------------------------------------------------------


def test_the_last_timed_output_is_handed_on() -> None:
    seen: list[Any] = []
    timing = time_layer(honest.QuasarAttention, 16, CPU, inspect=lambda *all_: seen.append(all_))
    ((layer, x, y),) = seen
    assert torch.equal(layer(x)[0], y)
    assert timing.vram_bytes == 0
    assert timing.elapsed_seconds > 0


class CountsCalls(honest.QuasarAttention):
    seen: tuple[Any, ...] = ()

    def forward(self, x, **options):
        state = (x.shape, x.dtype, self.training, torch.is_grad_enabled())
        type(self).seen += (state,)
        return super().forward(x, **options)


def test_the_loop_on_a_cpu_is_the_validators() -> None:
    time_layer(CountsCalls, 16, CPU)
    assert CountsCalls.seen == (((1, 16, 512), torch.float32, True, False),) * 13


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_row_26_a_clock_that_runs_wrong_is_noticed(monkeypatch, speed):
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() * speed)
    assert tampered() == ["time.time"]
    with pytest.raises(InvalidRunError, match=r"replaced time\.time"):
        time_layer(honest.QuasarAttention, 16, CPU)
    # Even when the replacement goes unnoticed, as when the system clock itself is set.
    monkeypatch.setattr("harness.worker.subject.timing.tampered", list)
    with pytest.raises(InvalidRunError, match="the system clock counted"):
        time_layer(honest.QuasarAttention, 16, CPU)


# ---- figures ---------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    expected = torch.ones(1, 16, 2)
    actual = expected.clone()
    actual[:, -2:] = 1.5  # the last eighth
    found = figures(actual, expected)
    assert found.worst_part == pytest.approx(0.5)
    assert found.relative_rms == pytest.approx(0.5 / 8**0.5)
    assert found.max_difference == pytest.approx(0.5)
    assert found.cosine == pytest.approx((28 + 6) / (32 * (28 + 9)) ** 0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_figures_of_values_that_are_not_finite_pass_no_limit(bad: float) -> None:
    actual = torch.ones(1, 9, 2)
    actual[0, 4, 1] = bad
    found = figures(actual, torch.ones(1, 9, 2))
    assert not found.relative_rms < 1e300
    assert found.max_difference == float("inf")
    assert not found.cosine >= 0.999


def test_figures_of_zeros() -> None:
    zeros = torch.zeros(1, 1, 2)
    assert (figures(zeros, zeros).relative_rms, figures(zeros, zeros).cosine) == (0, 1)
    assert figures(zeros + 1, zeros).relative_rms == float("inf")
