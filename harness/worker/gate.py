"""Correctness before timing: the operator and the layer against the float64 definition.

Inputs are fresh, from a secret seed, so that nothing can be prepared for them. The limits are
those of `compare.LIMITS`. "Gate" means this correctness gate everywhere but in the
overlay: there it is the layer's output gate, while gate.py, whose name the fork's rules ask for,
holds the step size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.report import GateResult
from harness.worker.compare import Checker
from harness.worker.timing import InvalidRunError, recording, tampered
from harness.workload import ORACLE_LENGTH, WORKLOAD
from quasar_kernels.reference import quasar_chunked, quasar_layer

Operator = Callable[..., tuple[Tensor, Tensor | None]]


LENGTHS = (1, 65, 257, 512)
"""Lengths, in tokens, at which every gate compares the operator, besides the measured one."""

LAYER_EXACT = 4096
"""Longest sequence at which the layer is compared in float64; beyond it the oracle is fp32."""

GRADIENT_LENGTH = 130


class _Inputs(NamedTuple):
    """Operator inputs as the layer makes them: q, k, v `[1, T, H, S]`, beta `[H]` fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor

    def clone(self) -> _Inputs:
        return _Inputs(*(tensor.detach().clone() for tensor in self))


def _layer_like(checker: Checker, length: int, *, correlated: bool = False) -> _Inputs:
    """Return inputs distributed as behind the short convolutions, with one key of zeros."""
    shape = (1, length, WORKLOAD.num_heads, WORKLOAD.head_dim)
    q, k, v = (F.silu(0.5 * checker.normal(*shape)) for _ in range(3))
    if correlated:
        k = F.silu(0.5 * checker.normal(1, 1, *shape[2:])) * (1 + 0.1 * checker.normal(*shape))
    elif length > 1:
        k[:, checker.below(length)] = 0
    uniform = torch.rand(WORKLOAD.num_heads, generator=checker.generator, device=checker.device)
    beta = F.softplus(torch.log(1 + 15 * uniform))
    tensors = [*(tensor.to(checker.dtype) for tensor in (q, k, v)), beta]
    if checker.device.type == "cuda":  # the timed calls record gradients there
        tensors = [tensor.requires_grad_() for tensor in tensors]
    return _Inputs(*tensors)


@contextmanager
def _poisoned() -> Iterator[None]:
    """Let torch fill new memory with NaN, so that an element that is never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _call(checker: Checker, operator: Operator, inputs: _Inputs) -> Tensor:
    # The result is used on the caller's stream at once: work left on another one is missed.
    with recording(checker.device):
        return operator(*inputs)[0].detach()


def _oracle(inputs: _Inputs) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return quasar_chunked(*inputs)


def _check_length(checker: Checker, operator: Operator, length: int, *, correlated: bool) -> None:
    name, where = "operator", f"{length} tokens"
    limit = checker.limits.operator
    if correlated:
        name, limit = "operator on correlated keys", checker.limits.correlated
    inputs = _layer_like(checker, length, correlated=correlated)
    saved = inputs.clone()
    actual = _call(checker, operator, inputs)
    for label, now, then in zip(inputs._fields, inputs, saved, strict=True):
        checker.unchanged("operator: inputs changed", f"{label}, {where}", now, then)
    checker.bound(
        "operator: outputs of another dtype", where, int(actual.dtype != checker.dtype), 0
    )
    checker.compare(name, where, actual, _oracle(saved)[0], limit)


def _check_state(checker: Checker, operator: Operator) -> None:
    where = "257 tokens"
    inputs = _layer_like(checker, 257)
    with recording(checker.device):
        _, state = operator(*inputs, output_final_state=True)
    checker.bound("final state: missing", where, int(state is None), 0)
    if state is not None:
        limit = checker.limits.operator
        checker.compare("final state", where, state.detach(), _oracle(inputs)[1], limit)


def _check_reuse(checker: Checker, operator: Operator) -> None:
    """New values in the same memory must give new outputs, and leave the old ones alone."""
    where = "257 tokens, inputs refilled in place"
    inputs, fresh = _layer_like(checker, 257), _layer_like(checker, 257)
    first = _call(checker, operator, inputs)
    kept = first.clone()
    with torch.no_grad():
        for old, new in zip(inputs, fresh, strict=True):
            old.copy_(new)
    second = _call(checker, operator, inputs)
    checker.compare("operator", where, second, _oracle(fresh)[0], checker.limits.operator)
    checker.unchanged("operator: earlier outputs changed", where, first, kept)


def _check_causality(checker: Checker, operator: Operator, length: int) -> None:
    """Changing the future must leave every bit of the past."""
    inputs, other = _layer_like(checker, length), _layer_like(checker, length)
    cut = 1 + checker.below(length - 1)
    before = _call(checker, operator, inputs)
    with torch.no_grad():
        for mine, new in zip(inputs[:3], other[:3], strict=True):  # beta has no time
            mine[:, cut:] = new[:, cut:]
    after = _call(checker, operator, inputs)
    where = f"{length} tokens"
    checker.unchanged(
        "operator: past outputs that see the future", where, after[:, :cut], before[:, :cut]
    )


def _check_layer(checker: Checker, layer_class: Any, length: int) -> None:
    """Compare the layer twice, the second time with other values in the same memory."""
    layer = layer_class(**WORKLOAD.layer_arguments()).to(checker.device)
    weights = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    x = checker.normal(1, length, WORKLOAD.hidden_size)
    for where in (f"{length} tokens", f"{length} tokens, input refilled in place"):
        saved = x.clone()
        with recording(checker.device):
            y = layer(x)[0].detach()
        checker.unchanged("layer: inputs changed", where, x, saved)
        _compare_layer(checker, where, weights, x, y)
        x.copy_(checker.normal(*x.shape))
    for name, value in layer.state_dict().items():
        checker.unchanged("layer: weights changed", name, value, weights[name])


def _compare_layer(
    checker: Checker, where: str, weights: dict[str, Tensor], x: Tensor, y: Tensor
) -> None:
    """Compare the layer's output with the definition, all of it where memory allows."""
    length = x.shape[1]
    compared, dtype = length, torch.float64
    if length > LAYER_EXACT:
        dtype = torch.float32
        if not _fits(checker.device, 20 * 4 * length * WORKLOAD.hidden_size):
            compared = LAYER_EXACT  # exact all the same: the output there does not see the rest
            checker.bound("layer: values not finite", where, int((~y.isfinite()).sum()), 0)
    with torch.no_grad():
        expected = quasar_layer(
            weights,
            x[:, :compared],
            num_heads=WORKLOAD.num_heads,
            head_dim=WORKLOAD.head_dim,
            dtype=dtype,
        )
    checker.compare("layer", where, y[:, :compared], expected, checker.limits.layer)


def _check_gradients(checker: Checker, layer_class: Any) -> None:
    """Every parameter must get a real gradient, that of the definition in float64."""
    layer = layer_class(**WORKLOAD.layer_arguments()).to(checker.device)
    x = checker.normal(1, GRADIENT_LENGTH, WORKLOAD.hidden_size).requires_grad_()
    toward = checker.normal(*x.shape)
    with torch.autocast("cuda", torch.bfloat16, enabled=checker.device.type == "cuda"):
        y = layer(x)[0]
    torch.autograd.backward((y.float() * toward).sum())

    exact = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    exact_x = x.detach().double().requires_grad_()
    wanted = quasar_layer(exact, exact_x, num_heads=WORKLOAD.num_heads, head_dim=WORKLOAD.head_dim)
    torch.autograd.backward((wanted * toward.double()).sum())

    pairs = {n: (p.grad, exact[n].grad) for n, p in layer.named_parameters()}
    pairs["input"] = (x.grad, exact_x.grad)
    found, expected = [], []
    for name, (grad, exact_grad) in pairs.items():
        assert exact_grad is not None  # noqa: S101 # the definition depends on all of them
        actual = torch.zeros_like(exact_grad) if grad is None else grad.double()
        found.append(actual.flatten())
        expected.append(exact_grad.flatten())
        checker.bound(
            "gradients: cosine",
            name,
            float(F.cosine_similarity(found[-1], expected[-1], dim=0)),
            checker.limits.parameter_gradient_cosine,
            at_least=True,
        )
    cosine = F.cosine_similarity(torch.cat(found), torch.cat(expected), dim=0)
    limit = checker.limits.layer_gradient_cosine
    checker.bound("gradients together: cosine", "all", float(cosine), limit, at_least=True)


def _fits(device: torch.device, size: int) -> bool:
    """Tell whether `size` bytes leave a third of the device's free memory."""
    if device.type != "cuda":
        return True  # only short sequences are measured there
    torch.cuda.empty_cache()
    return size <= torch.cuda.mem_get_info(device)[0] * 2 // 3


def _longest(device: torch.device, length: int) -> int:
    """Return the longest sequence, up to `length`, that the float64 oracle can hold."""
    width = WORKLOAD.num_heads * WORKLOAD.head_dim
    return length if _fits(device, 12 * 8 * length * width) else min(length, ORACLE_LENGTH)


def _checker_for(device: torch.device, seed: int) -> Checker:
    """Return an empty checker: bf16 inputs on CUDA, fp32 on a CPU, as the validator's loop has."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Checker(device, dtype, torch.Generator(device).manual_seed(seed))


def inspect_timed(layer: Any, x: Tensor, y: Tensor) -> None:
    """Compare the beginning of the last timed output with the definition, and see all finite.

    Raises:
        InvalidRunError: what was timed did not compute the layer.
    """
    checker = _checker_for(x.device, seed=0)  # draws nothing
    start = slice(0, min(257, x.shape[1]))
    weights = {name: value.detach() for name, value in layer.state_dict().items()}
    where = "last timed output"
    _compare_layer(checker, where, weights, x[:, start], y[:, start])
    checker.bound("layer: values not finite", where, int((~y.isfinite()).sum()), 0)
    wrong = [str(check) for check in checker.worst.values() if not check.passed]
    if wrong:
        raise InvalidRunError(wrong[0])


def run_gate(
    operator: Operator,
    layer_class: Any,
    length: int,
    device: torch.device,
    *,
    source_digest: str = "",
    seed: int | None = None,
) -> GateResult:
    """Check `chunk_quasar` and the layer class on `device`, also at `length` tokens.

    Args:
        seed: of the inputs; None draws a secret one.

    Raises whatever the code under test raises.
    """
    started = time.monotonic()
    seed = int.from_bytes(os.urandom(7), "big") if seed is None else seed
    checker = _checker_for(device, seed)
    longest = _longest(device, length)
    with _poisoned():
        for tokens in sorted({*LENGTHS, longest}):
            _check_length(checker, operator, tokens, correlated=False)
        _check_length(checker, operator, 512, correlated=True)
        _check_state(checker, operator)
        _check_reuse(checker, operator)
        for tokens in sorted({300, min(max(longest, 1000), 5000)}):
            _check_causality(checker, operator, tokens)
        _check_gradients(checker, layer_class)
        for tokens in sorted({257, length}):
            _check_layer(checker, layer_class, tokens)
    checker.bound("functions replaced", ", ".join(tampered()) or "none", len(tampered()), 0)
    return GateResult(
        passed=all(check.passed for check in checker.worst.values()),
        checks=tuple(checker.worst.values()),
        device=device.type,
        dtype=str(checker.dtype).removeprefix("torch."),
        longest=max(*LENGTHS, longest),
        seconds=time.monotonic() - started,
        seed=f"{seed:014x}",
        source_digest=source_digest,
    )
