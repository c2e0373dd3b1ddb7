"""The proof that the timed calls computed: a few more, which nothing can know beforehand.

After the validator's loop, in the same process, the layer is given other weights and another input
in the same memory. Then the referee sends factors for the rows of its weights and places in its
output, for some calls in a row, takes the time by its own clock until the values at those places
are back, and compares them. Every output depends on its factors, so nothing computed, kept or
skipped before helps; and a loop that is faster than such calls was not the layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.worker.compare import Checker
from harness.worker.failures import WorkerError
from harness.worker.gate import checker_for, compare_layer
from harness.worker.inputs import drawn
from harness.worker.referee import Remote
from harness.workload import WORKLOAD

SCALED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.1.weight", "o_proj.weight")
PLACES = 64

CALLS_LEAST, CALLS_MOST, SECONDS = 4, 10, 8e-3
"""Calls in a row, as in the loop: as many as take some time, since one alone on a GPU at rest, with
its message, takes up to 2 ms more. Each is compared, which takes long for long ones."""

ATTEMPTS = 5
"""Rows of calls that may be disturbed: interference makes them slower, never faster."""

RATIO = {"cuda": 1.3, "cpu": 3.0}
ALLOWANCE = {"cuda": 4e-3, "cpu": 20e-3}
"""Proven calls may take `RATIO` times what timed ones took, and these seconds for the messages."""


@dataclass
class _Row:
    """Calls in a row: their weights' factors and places, and what came back."""

    factors: dict[str, Tensor]
    places: Tensor
    seconds: float
    found: Tensor


def prove(subject: Remote, length: int, device: torch.device, seconds_per_call: float) -> None:
    """Have the subject prove what a timed call of `length` tokens took; the subject ends.

    Raises:
        WorkerError: its outputs are wrong (`gate`), or its calls take longer than the timed ones.
    """
    checker = checker_for(device)
    weights = _new_weights(subject)
    shape, seed = (1, length, WORKLOAD.hidden_size), checker.seed()
    subject.draw("x", shape, seed)
    subject.ask("adopt", weights)
    calls = max(CALLS_LEAST, min(math.ceil(SECONDS / max(seconds_per_call, 1e-9)), CALLS_MOST))
    limit = calls * RATIO[device.type] * seconds_per_call + ALLOWANCE[device.type]
    before = {name: torch.ones(1, weights[name].shape[0]) for name in SCALED}
    fastest = math.inf
    for _ in range(ATTEMPTS):
        row = _ask(checker, subject, before, length, calls)
        fastest = min(fastest, row.seconds)
        if fastest <= limit:
            break
        before = {name: factors[-1:] for name, factors in row.factors.items()}
    else:
        raise WorkerError(
            f"{calls} calls on new values take {fastest * 1e3:.2f} ms where a timed call took "
            f"{seconds_per_call * 1e3:.2f} ms: the timed calls did not compute the layer",
            "gate",
        )
    y = subject.fetch(("y",))["y"]
    subject.end()  # its memory is needed for the expected values
    _compare(checker, drawn(shape, seed, device), y, weights, row)


def _ask(
    checker: Checker, subject: Remote, before: Mapping[str, Tensor], length: int, calls: int
) -> _Row:
    """Have the layer called in a row; `before` are the factors that its weights have already."""
    factors = {name: _factors(checker, calls, one.shape[1]) for name, one in before.items()}
    places = torch.randint(
        length, (calls, PLACES), generator=checker.generator, device=checker.device
    ).cpu()
    places[:, -1] = length - 1
    steps = {name: all_ / torch.cat((before[name], all_[:-1])) for name, all_ in factors.items()}
    started = time.monotonic()
    _, found = subject.ask("prove", {**steps, "rows": places})
    seconds = time.monotonic() - started
    return _Row(factors, places, seconds, found.get("rows", torch.zeros(0)))


def _factors(checker: Checker, *shape: int) -> Tensor:
    uniform = torch.rand(*shape, generator=checker.generator, device=checker.device)
    return (0.7 + 0.6 * uniform).cpu()


def _new_weights(subject: Remote) -> dict[str, Tensor]:
    """Return weights like those of a new layer, in the shapes of the subject's."""
    weights = {name: value.float() for name, value in subject.weights().items()}
    missing = [name for name in SCALED if name not in weights]
    if missing:
        raise WorkerError(f"the layer has no weight {missing[0]}", "gate")
    return {name: value.roll(1, 0) for name, value in weights.items()}


def _compare(
    checker: Checker, x: Tensor, y: Tensor, weights: Mapping[str, Tensor], row: _Row
) -> None:
    """Compare each call at its places, and the last one's output in full."""
    device, limit = checker.device, checker.limits.layer
    for call, places in enumerate(row.places):
        scaled = {n: weights[n] * factors[call][:, None] for n, factors in row.factors.items()}
        on_device = {n: value.to(device) for n, value in {**weights, **scaled}.items()}
        whole = y.to(device) if call == len(row.places) - 1 else None
        expected = compare_layer(checker, "call on new values", on_device, x, whole)
        known = places < expected.shape[1]
        wanted = expected[:, places[known].to(device)]
        complete = row.found.shape[:3] == (len(row.places), 1, PLACES)
        got = (row.found[call][:, known] if complete else row.found).to(device)
        checker.compare("layer", "random places of a call on new values", got, wanted, limit)
    wrong = [str(check) for check in checker.worst.values() if not check.passed]
    if wrong:
        raise WorkerError(f"after the timed calls, {wrong[0]}", "gate")
