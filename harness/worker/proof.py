"""The proof that the timed calls computed: one more call, which nothing can know beforehand.

After the validator's loop, in the same process, the layer is given other weights and another input
in the same memory. Then the referee sends factors for the rows of its weights and places in its
output, takes the time by its own clock until the values at those places are back, and compares
them. Every output depends on the factors, so nothing computed, kept or skipped before helps; and a
loop that is faster than such a call was not the layer.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from harness.worker.compare import Checker
from harness.worker.failures import WorkerError
from harness.worker.gate import checker_for, compare_layer
from harness.worker.referee import Remote
from harness.workload import WORKLOAD

SCALED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.1.weight", "o_proj.weight")
PLACES = 64

ATTEMPTS = 5
"""Calls that may be disturbed: interference makes a call slower, never faster."""

RATIO = {"cuda": 1.3, "cpu": 3.0}
ALLOWANCE = {"cuda": 0.5e-3, "cpu": 5e-3}
"""A proven call may take `RATIO` times what a timed call took, and these seconds for messages."""


def prove(subject: Remote, length: int, device: torch.device, seconds_per_call: float) -> None:
    """Have the subject prove what a timed call of `length` tokens took; the subject ends.

    Raises:
        WorkerError: its outputs are wrong (`gate`), or its calls take longer than the timed ones.
    """
    checker = checker_for(device)
    weights = _new_weights(subject)
    x = checker.normal(1, length, WORKLOAD.hidden_size)
    subject.put({"x": x})
    subject.ask("adopt", weights)
    limit = RATIO[device.type] * seconds_per_call + ALLOWANCE[device.type]
    calls: list[tuple[dict[str, Tensor], Tensor, Tensor]] = []
    fastest = float("inf")
    while fastest > limit and len(calls) < ATTEMPTS:
        scales = {name: _factors(checker, weights[name].shape[0]) for name in SCALED}
        places = torch.tensor([checker.below(length) for _ in range(PLACES - 1)] + [length - 1])
        started = time.monotonic()
        _, found = subject.ask("prove", {**scales, "rows": places})
        fastest = min(fastest, time.monotonic() - started)
        weights = {n: w * scales[n][:, None] if n in scales else w for n, w in weights.items()}
        calls.append((weights, places, found.get("rows", torch.zeros(0))))
    y = subject.fetch(("y",))["y"]
    subject.end()  # its memory is needed for the expected values
    if fastest > limit:
        raise WorkerError(
            f"a call on new values takes {fastest * 1e3:.2f} ms where the timed calls took "
            f"{seconds_per_call * 1e3:.2f} ms each: the timed calls did not compute the layer",
            "gate",
        )
    _compare(device, x, y, calls)


def _factors(checker: Checker, count: int) -> Tensor:
    drawn = torch.rand(count, generator=checker.generator, device=checker.device)
    return (0.7 + 0.6 * drawn).cpu()


def _new_weights(subject: Remote) -> dict[str, Tensor]:
    """Return weights like those of a new layer, in the shapes of the subject's."""
    weights = {name: value.float() for name, value in subject.weights().items()}
    missing = [name for name in SCALED if name not in weights]
    if missing:
        raise WorkerError(f"the layer has no weight {missing[0]}", "gate")
    return {name: value.roll(1, 0) for name, value in weights.items()}


def _compare(
    device: torch.device,
    x: Tensor,
    y: Tensor,
    calls: list[tuple[dict[str, Tensor], Tensor, Tensor]],
) -> None:
    """Compare the last output in full and every call at its places."""
    checker = checker_for(device)
    for number, (weights, places, rows) in enumerate(calls):
        on_device = {name: value.to(device) for name, value in weights.items()}
        whole = y.to(device) if number == len(calls) - 1 else None
        expected = compare_layer(checker, "call on new values", on_device, x, whole)
        known = places < expected.shape[1]
        wanted = expected[:, places[known].to(device)]
        got = rows.to(device)[:, known.to(device)] if rows.ndim == wanted.ndim else rows.to(device)
        limit = checker.limits.layer
        checker.compare("layer", "random places of a call on new values", got, wanted, limit)
    wrong = [str(check) for check in checker.worst.values() if not check.passed]
    if wrong:
        raise WorkerError(f"after the timed calls, {wrong[0]}", "gate")
