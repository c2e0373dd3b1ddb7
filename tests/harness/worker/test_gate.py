"""The gate against a zoo of wrong and cheating operators and layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.report import GateResult
from harness.worker.compare import figures
from harness.worker.gate import inspect_timed, run_gate
from harness.worker.timing import InvalidRunError, tampered, time_layer
from harness.workload import WORKLOAD
from tests.harness import honest

CPU = torch.device("cpu")
Operator = Callable[..., tuple[Tensor, Tensor | None]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are tiny: on a busy machine a second thread makes them ten times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gate(operator: Operator = honest.chunk_quasar, layer: Any = None) -> GateResult:
    return run_gate(operator, layer or honest.QuasarAttention, 64, CPU, source_digest="s")


def names(result: GateResult) -> str:
    return "; ".join(check.name for check in result.failed)


def test_an_honest_operator_and_layer_pass_with_every_figure_on_record() -> None:
    result = gate()
    assert result.passed, [str(check) for check in result.failed]
    assert (result.device, result.dtype, result.longest) == ("cpu", "float32", 512)
    errors = [c for c in result.checks if c.name.endswith("relative RMS error")]
    assert len(errors) == 4
    assert all(c.value is not None and 0 < c.value < 1e-5 for c in errors)


def test_the_seed_is_secret_and_fresh() -> None:
    seen: list[Tensor] = []

    def remember(q: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        seen.append(q.clone())
        return torch.zeros_like(q), None

    first, second = gate(remember), gate(remember)
    assert first.seed != second.seed
    assert not torch.equal(seen[0], seen[len(seen) // 2])


def test_a_key_of_zeros_is_among_the_inputs() -> None:
    """A key of zeros is where alpha would be 0 / 0."""
    with_zeros = 0

    def look(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        nonlocal with_zeros
        with_zeros += int((k == 0).all(-1).all(-1).sum())
        return honest.chunk_quasar(q, k, *rest, **options)

    assert gate(look).passed
    assert with_zeros >= 3


# ---- operators -------------------------------------------------------------------------------


def wrong_decay(q, k, v, beta, **options):
    return honest.chunk_quasar(q, k, v, 1.05 * beta, **options)


def reads_the_future(q, k, v, beta, **options):
    o, state = honest.chunk_quasar(q, k, v, beta, **options)
    return o + 1e-6 * v.flip(1), state


def mutates_its_input(q, k, v, beta, **options):
    result = honest.chunk_quasar(q, k, v, beta, **options)
    k.mul_(1.0001)
    return result


def leaves_output_unwritten(q, k, v, beta, **options):
    o, state = honest.chunk_quasar(q, k, v, beta, **options)
    out = torch.empty_like(o)
    out[:, : max(1, o.shape[1] - 1)] = o[:, : max(1, o.shape[1] - 1)]
    return out, state


def lower_precision(q, k, v, beta, **options):
    o, state = honest.chunk_quasar(q.bfloat16(), k.bfloat16(), v.bfloat16(), beta, **options)
    return o.to(q.dtype), state


def another_dtype(q, k, v, beta, **options):
    o, state = honest.chunk_quasar(q, k, v, beta, **options)
    return o.double(), state


def skips_the_last_chunk(q, k, v, beta, **options):
    o, state = honest.chunk_quasar(q, k, v, beta, **options)
    if o.shape[1] > 256:
        o[:, -32:] = 0
    return o, state


def overflows(q, k, v, beta, **options):
    o, state = honest.chunk_quasar(q, k, v, beta, **options)
    o[:, -1] = float("inf")
    return o, state


def another_shape(q, k, v, beta, **options):
    o, state = honest.chunk_quasar(q, k, v, beta, **options)
    return o.transpose(1, 2), state


def forgets_the_state(q, k, v, beta, **options):
    return honest.chunk_quasar(q, k, v, beta)


def caching() -> Operator:
    """Return an operator that keeps its output by the address and the shape of its inputs."""
    cache: dict[Any, tuple[Tensor, Tensor | None]] = {}

    def cached(q, k, v, beta, **options):
        key = (q.data_ptr(), q.shape, bool(options))
        if key not in cache:
            # Holding q keeps its address from being used again for other inputs.
            cache[key] = (*honest.chunk_quasar(q, k, v, beta, **options), q)
        return cache[key][:2]

    return cached


def one_buffer() -> Operator:
    """Return an operator that writes every result of a shape into the same memory."""
    buffers: dict[Any, Tensor] = {}

    def reuse(q, k, v, beta, **options):
        o, state = honest.chunk_quasar(q, k, v, beta, **options)
        return buffers.setdefault(o.shape, torch.empty_like(o)).copy_(o), state

    return reuse


@pytest.mark.parametrize(
    ("operator", "failed"),
    [
        (wrong_decay, "operator: relative RMS error"),
        (reads_the_future, "operator: past outputs that see the future"),
        (mutates_its_input, "operator: inputs changed"),
        (leaves_output_unwritten, "operator: relative RMS error"),
        (lower_precision, "operator: relative RMS error"),
        (another_dtype, "operator: outputs of another dtype"),
        (skips_the_last_chunk, "operator: error of the worst eighth"),
        (overflows, "operator: largest difference"),
        (another_shape, "operator: outputs of another shape"),
        (forgets_the_state, "final state: missing"),
        (caching(), "operator: relative RMS error"),
        (one_buffer(), "operator: earlier outputs changed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_row_26_a_wrong_operator_is_red(operator: Operator, failed: str) -> None:
    result = gate(operator)
    assert not result.passed
    assert failed in names(result)


# ---- layers ----------------------------------------------------------------------------------


class NoGate(honest.QuasarAttention):
    def forward(self, x, **options):
        self.get_parameter("g_proj.1.bias").data.zero_()
        y, *rest = super().forward(x, **options)
        return y * 1.03, *rest


class ZeroGradients(honest.QuasarAttention):
    def mixed(self, x, name):
        mixed = super().mixed(x, name)
        return mixed.detach() if name == "k" else mixed


class WrongGradients(honest.QuasarAttention):
    def mixed(self, x, name):
        mixed = super().mixed(x, name)
        if mixed.requires_grad and name == "v":
            mixed.register_hook(lambda grad: grad.flip(1))
        return mixed


class RemembersItsInput(honest.QuasarAttention):
    def forward(self, x, **options):
        if not hasattr(self, "kept"):
            object.__setattr__(self, "kept", super().forward(x, **options))
        return self.kept


class ScribblesOnItsInput(honest.QuasarAttention):
    def forward(self, x, **options):
        result = super().forward(x, **options)
        if not x.requires_grad:
            x.add_(1)
        return result


@pytest.mark.parametrize(
    ("layer", "failed"),
    [
        (NoGate, "layer: weights changed"),
        (NoGate, "layer: relative RMS error"),
        (ZeroGradients, "gradients: cosine"),
        (WrongGradients, "gradients: cosine"),
        (RemembersItsInput, "layer: relative RMS error"),
        (ScribblesOnItsInput, "layer: inputs changed"),
    ],
)
def test_row_26_a_wrong_layer_is_red(layer: Any, failed: str) -> None:
    result = gate(layer=layer)
    assert failed in names(result)


def test_a_gradient_of_zero_names_its_parameter() -> None:
    (check,) = [c for c in gate(layer=ZeroGradients).failed if c.name == "gradients: cosine"]
    assert "k_" in check.where
    assert check.value == 0


# ---- what the timed process checks -----------------------------------------------------------


class StopsWorking(honest.QuasarAttention):
    """Right until the timed calls begin."""

    calls = 0

    def forward(self, x, **options):
        type(self).calls += 1
        if self.calls > WORKLOAD.warmup_calls:
            return torch.zeros_like(x), None, None
        return super().forward(x, **options)


def test_row_26_the_last_timed_output_is_compared() -> None:
    with pytest.raises(InvalidRunError, match="last timed output"):
        time_layer(StopsWorking, 16, CPU, inspect=inspect_timed)
    timing = time_layer(honest.QuasarAttention, 16, CPU, inspect=inspect_timed)
    assert timing.vram_bytes == 0
    assert 0 < timing.elapsed_seconds < 60


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
def test_row_26_a_clock_that_runs_wrong_is_noticed(
    monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() * speed)
    assert tampered() == ["time.time"]
    with pytest.raises(InvalidRunError, match=r"replaced time\.time"):
        time_layer(honest.QuasarAttention, 16, CPU)
    # Even when the replacement goes unnoticed, as when the system clock itself is set.
    monkeypatch.setattr("harness.worker.timing.tampered", list)
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
