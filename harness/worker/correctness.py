"""The correctness check: the operator and the layer against the float64 definition.

Inputs are drawn from a secret seed, so that code cannot be prepared for them. The limits are
those of `compare.LIMITS`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.sample import Correctness
from harness.worker.chain import drawn
from harness.worker.channel import SubjectProxy
from harness.worker.compare import Checker
from harness.worker.failures import WorkerError
from harness.worker.own_layer import draw_weights
from harness.worker.subject.serve import InProcessSubject
from harness.workload import ORACLE_LENGTH, WORKLOAD
from quasar_kernels.reference import quasar_chunked, quasar_layer

LENGTHS = (1, 65, 257, 512)
"""Lengths in tokens at which every check compares the operator, besides the longest that fits."""

LAYER_EXACT = 4096
"""Longest sequence at which the layer is compared in float64; beyond it the oracle is fp32."""

GRADIENT_LENGTH = 130

SLOWEST, FASTEST = 0.0013, 2.8
"""Least and largest beta of the heads in some comparisons. The slowest head remembers 10,000 tokens
or more. With a new layer's parameters the state decays so fast that code which computes overlapping
pieces without passing the state on would be accepted."""
SLOW_LENGTH = 1024
"""Fewest tokens at which the operator is compared with such heads, besides the longest length."""

SAMPLED = 4096
"""Tokens checked for changes after a call, in inputs of more than `ORACLE_LENGTH` tokens."""

BURST = 1000.0
"""Factor of the first values. They stay in the state long enough to show in later outputs."""


Subject = SubjectProxy | InProcessSubject
"""The code under test, in another process or in this one."""

Inputs = dict[str, Tensor]
"""Operator inputs as the layer makes them: q, k, v `[1, T, H, S]`, beta `[H]` fp32."""


def _layer_like(checker: Checker, length: int) -> Inputs:
    """Return inputs distributed like outputs of the short convolutions, with one key of zeros."""
    shape = (1, length, WORKLOAD.num_heads, WORKLOAD.head_dim)
    q, k, v = (F.silu(0.5 * checker.normal(*shape)) for _ in range(3))
    if length > 1:
        k[:, checker.below(length)] = 0
    uniform = torch.rand(WORKLOAD.num_heads, generator=checker.generator, device=checker.device)
    beta = F.softplus(torch.log(1 + 15 * uniform))
    return {**{n: t.to(checker.dtype) for n, t in zip("qkv", (q, k, v), strict=True)}, "beta": beta}


def _slow_heads() -> Tensor:
    """Return a beta for each head, from SLOWEST to FASTEST."""
    return torch.logspace(math.log10(SLOWEST), math.log10(FASTEST), WORKLOAD.num_heads)


def _with_similar_keys(checker: Checker, inputs: Inputs, noise: float) -> Inputs:
    """Return the inputs with keys that are equal except for relative noise; 0 makes them equal."""
    shape = inputs["k"].shape
    one = F.silu(0.5 * checker.normal(1, 1, *shape[2:]))
    return {**inputs, "k": (one * (1 + noise * checker.normal(*shape))).to(checker.dtype)}


def _oracle(inputs: Inputs, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return quasar_chunked(inputs["q"], inputs["k"], inputs["v"], inputs["beta"], initial)


def _on(device: torch.device, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies, which later calls of the subject cannot change."""
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


class _Stages:
    """The stages of the check; each records its figures in `checker`."""

    def __init__(self, checker: Checker, subject: Subject) -> None:
        self.checker, self.subject = checker, subject

    def _operate(self, inputs: Inputs, *, initial: bool = False, final: bool = False) -> Inputs:
        self.subject.put(inputs)
        return _on(self.checker.device, self.subject.operate(initial=initial, final=final))

    def _built(self, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Let the subject make a layer; return all of the layer's weights."""
        weights = _on(self.checker.device, self.subject.build(given))
        for name, value in draw_weights(torch.device("cpu")).items():
            if name not in weights or weights[name].shape != value.shape:
                raise WorkerError(f"the layer lacks the weight {name} {list(value.shape)}", "gate")
        return weights

    def _same(self, name: str, where: str, expected: Mapping[str, Tensor]) -> None:
        """Compare the subject's stored tensors with the expected ones; long ones only in part."""
        length = max(tensor.shape[1] for tensor in expected.values() if tensor.ndim > 1)
        rows = None
        if length > ORACLE_LENGTH:
            rows = [self.checker.below(length) for _ in range(SAMPLED)]
            expected = {n: t[:, rows] for n, t in expected.items() if t.ndim > 1}
        stored = self.subject.fetch(tuple(expected), rows)
        for label, tensor in expected.items():
            now = stored[label].to(tensor.device)
            self.checker.unchanged(name, f"{label}, {where}", now, tensor)

    def lengths(self, length: int) -> None:
        """Compare the operator at fixed lengths, at two secret ones, and at `length`."""
        lengths = {*LENGTHS, length}
        wanted = len(lengths) + 2
        while len(lengths) < wanted:  # a length that is fixed already is not secret
            lengths.add(2 + self.checker.below(max(LENGTHS)))
        for tokens in sorted(lengths):
            self._compare(_layer_like(self.checker, tokens), f"{tokens} tokens")
        secret = SLOW_LENGTH + self.checker.below(SLOW_LENGTH)
        for tokens in sorted({secret, max(secret, length)}):
            slow = _layer_like(self.checker, tokens)
            slow["beta"] = _slow_heads().to(slow["beta"])
            self._compare(slow, f"{tokens} tokens", "operator of slow heads")
        inputs = _layer_like(self.checker, 512)
        correlated = self.checker.limits.correlated
        for name, noise in (("correlated keys", 0.1), ("repeated keys", 0.0)):
            similar = _with_similar_keys(self.checker, inputs, noise)
            self._compare(similar, "512 tokens", f"operator on {name}", correlated)

    def _compare(
        self, inputs: Inputs, where: str, name: str = "operator", limit: float | None = None
    ) -> None:
        checker = self.checker
        actual = self._operate(inputs)["o"]
        self._same("operator: inputs changed", where, inputs)
        other = int(actual.dtype != checker.dtype)
        checker.bound("operator: outputs of another dtype", where, other, 0)
        expected = _oracle(inputs)[0]
        checker.compare(name, where, actual, expected, limit or checker.limits.operator)

    def burst(self) -> None:
        """Outputs after large values must be within twice the limit for correlated keys."""
        inputs = _layer_like(self.checker, 600)
        inputs["v"][:, :20] *= BURST
        actual, expected = self._operate(inputs)["o"], _oracle(inputs)[0]
        where, limit = "600 tokens, the last 64", 2 * self.checker.limits.correlated
        self.checker.compare(
            "operator behind a burst", where, actual[:, -64:], expected[:, -64:], limit
        )

    def state(self) -> None:
        """Compare the final states of a call without an initial state and of a call with one.

        Of the second call, compare the outputs, too.
        """
        checker, where = self.checker, "257 tokens"
        limit = checker.limits.operator
        inputs = _layer_like(checker, 257)
        size = WORKLOAD.head_dim
        initial = checker.normal(1, WORKLOAD.num_heads, size, size)
        for start in (None, initial):
            if start is not None:
                self.subject.put({"initial": start})
                where = "257 tokens, from an initial state"
            result = self._operate(inputs, initial=start is not None, final=True)
            o, state = _oracle(inputs, start)
            checker.bound("final state: missing", where, int("state" not in result), 0)
            if start is not None:
                checker.compare("operator", where, result["o"], o, limit)
            if "state" in result:
                checker.compare("final state", where, result["state"], state, limit)

    def reuse(self) -> None:
        """New values in the same memory must give new outputs and leave earlier ones unchanged."""
        checker, where = self.checker, "257 tokens, inputs overwritten in place"
        limit = checker.limits.operator
        first = self._operate(_layer_like(checker, 257))["o"]
        fresh = _layer_like(checker, 257)
        second = self._operate(fresh)["o"]
        self._same("operator: earlier outputs changed", where, {"earlier": first})
        checker.compare("operator", where, second, _oracle(fresh)[0], limit)
        again = self._operate(fresh)["o"]
        apart = float((again - second).double().norm() / second.double().norm())
        checker.bound("operator: two calls on one input differ", where, apart, limit)

    def causality(self, length: int) -> None:
        """Changing later tokens must leave earlier outputs bitwise equal."""
        checker = self.checker
        inputs, other = _layer_like(checker, length), _layer_like(checker, length)
        cut = 1 + checker.below(length - 1)
        before = self._operate(inputs)["o"]
        for name in "qkv":  # beta has no time dimension
            inputs[name][:, cut:] = other[name][:, cut:]
        after = self._operate(inputs)["o"]
        name = "operator: past outputs that see the future"
        checker.unchanged(name, f"{length} tokens", after[:, :cut], before[:, :cut])

    def layer(self, length: int) -> None:
        """Compare the layer twice, the second time with other values in the same memory."""
        checker = self.checker
        weights = self._built()
        for where in (f"{length} tokens", f"{length} tokens, input overwritten in place"):
            shape, seed = (1, length, WORKLOAD.hidden_size), checker.seed()
            self.subject.draw("x", shape, seed)
            x = drawn(shape, seed, checker.device)
            y = _on(checker.device, self.subject.forward())["y"]
            self._same("layer: inputs changed", where, {"x": x})
            compare_layer(checker, where, weights, x, y)
        for name, value in _on(checker.device, self.subject.weights()).items():
            checker.unchanged("layer: weights changed", name, value, weights[name])

    def slow_layer(self, length: int) -> None:
        """Compare a layer of slow heads, to refuse code that computes pieces without a state."""
        checker, seed = self.checker, self.checker.seed()
        weights = self._built({"beta_log": _slow_heads().expm1().log()})
        self.subject.draw("x", (1, length, WORKLOAD.hidden_size), seed)
        y = _on(checker.device, self.subject.forward())["y"]
        x = drawn((1, length, WORKLOAD.hidden_size), seed, checker.device)
        compare_layer(checker, f"{length} tokens", weights, x, y, "layer of slow heads")

    def replaced(self) -> None:
        """Guarded functions, for example of the clock, must still be the original ones."""
        names = [str(name) for name in self.subject.tampered().get("names", ())]
        self.checker.bound("functions replaced", ", ".join(names) or "none", len(names), 0)

    def gradients(self) -> None:
        """Each parameter's gradient must agree with that of the definition in float64."""
        checker = self.checker
        weights = self._built()
        x = checker.normal(1, GRADIENT_LENGTH, WORKLOAD.hidden_size)
        toward = checker.normal(*x.shape)
        self.subject.put({"x": x, "toward": toward})
        gradients = _on(checker.device, self.subject.gradients())

        exact = {n: value.double().requires_grad_() for n, value in weights.items()}
        exact_x = x.double().requires_grad_()
        wanted = quasar_layer(
            exact, exact_x, num_heads=WORKLOAD.num_heads, head_dim=WORKLOAD.head_dim
        )
        torch.autograd.backward((wanted * toward.double()).sum())
        actual, expected = [], []
        for name, leaf in {**exact, "input": exact_x}.items():
            assert leaf.grad is not None  # noqa: S101 # the definition depends on all of them
            grad = gradients.get(name, torch.zeros(0))
            same = grad.shape == leaf.grad.shape
            actual.append((grad.double() if same else torch.zeros_like(leaf.grad)).flatten())
            expected.append(leaf.grad.flatten())
            cosine = F.cosine_similarity(actual[-1], expected[-1], dim=0)
            limit = checker.limits.parameter_gradient_cosine
            checker.bound("gradients: cosine", name, float(cosine), limit, at_least=True)
        cosine = F.cosine_similarity(torch.cat(actual), torch.cat(expected), dim=0)
        limit = checker.limits.layer_gradient_cosine
        checker.bound("gradients together: cosine", "all", float(cosine), limit, at_least=True)


def compare_layer(
    checker: Checker,
    where: str,
    weights: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    name: str = "layer",
) -> None:
    """Compare the layer's output with the definition, in full if memory allows.

    x and y are `[1, T, hidden_size]`; `name` and `where` name the comparison in the figures.
    """
    length = x.shape[1]
    compared, dtype = length, torch.float64
    if length > LAYER_EXACT:
        dtype = torch.float32
        if not _fits(checker.device, 20 * 4 * length * WORKLOAD.hidden_size):
            compared = LAYER_EXACT  # causal, so later tokens do not matter
            # in parts, because a mask for all of y would take much memory
            parts = torch.split(y, LAYER_EXACT, dim=1)
            bad = sum(int((~part.isfinite()).sum()) for part in parts)
            checker.bound(f"{name}: values not finite", where, bad, 0)
    with torch.no_grad():
        expected = quasar_layer(
            weights,
            x[:, :compared],
            num_heads=WORKLOAD.num_heads,
            head_dim=WORKLOAD.head_dim,
            dtype=dtype,
        )
    checker.compare(name, where, y[:, :compared], expected, checker.limits.layer)


def _fits(device: torch.device, size: int) -> bool:
    """Return whether `size` bytes leave a third of the device's free memory."""
    if device.type != "cuda":
        return True  # only short sequences are measured there
    torch.cuda.empty_cache()
    return size <= torch.cuda.mem_get_info(device)[0] * 2 // 3


def _longest(device: torch.device, length: int) -> int:
    """Return the longest sequence, up to `length`, that the float64 oracle can hold."""
    width = WORKLOAD.num_heads * WORKLOAD.head_dim
    return length if _fits(device, 12 * 8 * length * width) else min(length, ORACLE_LENGTH)


def check_correctness(
    subject: Subject,
    length: int,
    device: torch.device,
    *,
    source_digest: str = "",
    seed: int | None = None,
    own: bool = False,
) -> Correctness:
    """Check `chunk_quasar` and the layer class on `device`, also at `length` tokens.

    It stops after the first stage that finds a fault. `seed` determines the inputs; None selects a
    secret seed. `own` is as in `Checker`. The subject's exceptions are not caught.
    """
    started = time.monotonic()
    checker = Checker.draw(device, seed, own=own)
    longest = _longest(device, length)
    run = _Stages(checker, subject)
    stages: tuple[Callable[[], None], ...] = (
        run.replaced,
        run.reuse,
        lambda: run.lengths(longest),
        run.burst,
        run.state,
        lambda: run.causality(300),
        lambda: run.causality(min(max(longest, 1000), 5000)),
        lambda: run.layer(257),
        lambda: run.layer(length),
        lambda: run.slow_layer(length),
        run.gradients,
    )
    for stage in stages:
        stage()
        if not checker.passed:
            break  # after a failure the later stages need not run
    run.replaced()  # calls may have replaced some
    return Correctness(
        passed=checker.passed,
        checks=tuple(checker.worst.values()),
        device=device.type,
        dtype=str(checker.dtype).removeprefix("torch."),
        longest=max(*LENGTHS, longest),
        seconds=time.monotonic() - started,
        seed=f"{checker.generator.initial_seed():014x}",
        source_digest=source_digest,
    )
