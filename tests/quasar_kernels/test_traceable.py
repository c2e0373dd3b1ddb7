"""The operators and the delta rule in graphs of torch.compile and torch.export, without breaks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fla.ops.quasar import chunk_quasar, fused_recurrent_quasar
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from quasar_kernels import delta_rule
from tests.quasar_kernels.delta_rule.calls import inputs
from tests.quasar_kernels.inputs import packed

QUASAR = {"chunk_quasar": chunk_quasar, "fused_recurrent_quasar": fused_recurrent_quasar}
FUNCTIONS = {**QUASAR, **{name: getattr(delta_rule, name) for name in delta_rule.__all__}}
GATE = {
    "use_gate_in_kernel": True,
    "A_log": torch.tensor([0.1, 0.3]),
    "dt_bias": torch.tensor([0.2, -0.4]),
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}
PACKED = packed([1, 30, 0, 64])


@pytest.fixture(autouse=True)
def _without_earlier_graphs():
    torch.compiler.reset()


@pytest.fixture(params=FUNCTIONS)
def name(request):
    return request.param


def autocast():
    """Return a context in which products of fp32 tensors are computed in bf16."""
    return torch.autocast("cpu", torch.bfloat16)


def has_decays(name: str) -> bool:
    return "gated" in name or "kda" in name


def tensors(name: str, T: int, B: int = 1, dtype: torch.dtype = torch.float32):
    """Return a call's tensors by their names."""
    x = inputs(T, B, dtype=dtype, channels="kda" in name)._asdict()
    if not has_decays(name):
        del x["g"]
    if name in QUASAR:
        x["beta"] = torch.rand(2)
    return x


def options(name: str, **more):
    """Return a call's arguments with as many options as it has; `more` is added."""
    found: dict[str, Any] = {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "scale": 0.5,
    }
    found |= GATE if has_decays(name) else {}
    if "kda" in name:
        found |= {"dt_bias": torch.linspace(-0.5, 0.5, 32), "lower_bound": -3.0}
    return found | more


def results(function, x, more, context=nullcontext):
    """Return a call's results, and the gradients of all floating-point tensors if it has any."""
    leaves = {
        key: y.detach().clone().requires_grad_()
        if torch.is_tensor(y) and y.is_floating_point()
        else y
        for key, y in (x | more).items()
    }
    with context():
        found = [y for y in function(**leaves) if y is not None]
    if found[0].requires_grad:
        sum(y.double().square().sum() for y in found).backward()
        found += [y.grad for y in leaves.values() if torch.is_tensor(y) and y.is_leaf]
    return found


def compare(found, expected) -> None:
    assert len(found) == len(expected)
    for n, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert (x is None) == (y is None), n
        assert x is None or (x.dtype == y.dtype and torch.equal(x, y)), n


@pytest.mark.parametrize("full", [False, True], ids=["few arguments", "all arguments"])
def test_torch_s_checks_of_an_operator(name, full):
    more = {"initial_state": torch.randn(4, 2, 16, 16), "cu_seqlens": PACKED}
    arguments = tensors(name, 95) | (options(name, **more) if full else {})
    for key, x in arguments.items():
        if torch.is_tensor(x) and x.is_floating_point():
            arguments[key] = x.requires_grad_()
    operator = getattr(torch.ops.quasar, name).default
    outcome = torch.library.opcheck(operator, (), arguments)
    assert set(outcome.values()) == {"SUCCESS"}, outcome


@pytest.mark.parametrize(
    ("dtype", "context"),
    [(torch.float32, autocast), (torch.bfloat16, torch.no_grad), (torch.float64, nullcontext)],
)
def test_one_graph_gives_the_bits_of_the_plain_call(name, context, dtype):
    function = FUNCTIONS[name]
    compiled = torch.compile(
        lambda **x: function(**x), fullgraph=True, backend="aot_eager", dynamic=False
    )
    few = tensors(name, 20, 2, dtype)
    many = tensors(name, 95, dtype=dtype)
    more = options(name, initial_state=torch.randn(4, 2, 16, 16), cu_seqlens=PACKED)
    for x, others in ((few, {}), (many, more), (few, {"initial_state": None})):
        found = results(compiled, x, others, context)
        compare(found, results(function, x, others, context))


def test_other_lengths_and_batches_need_one_more_graph(name):
    counter, function = CompileCounterWithBackend("aot_eager"), FUNCTIONS[name]
    compiled = torch.compile(lambda **x: function(**x), fullgraph=True, backend=counter)
    for T, B in ((20, 2), (70, 3), (33, 5)):
        x = tensors(name, T, B)
        compare(results(compiled, x, {}), results(function, x, {}))
    assert counter.frame_count <= 2
    for lengths in ([3, 4], [5, 6, 7], [30, 1, 80, 2]):
        x, more = tensors(name, sum(lengths)), options(name, cu_seqlens=packed(lengths))
        compare(results(compiled, x, more), results(function, x, more))
    assert counter.frame_count <= 4


@pytest.mark.nightly
def test_within_other_operations_by_inductor():
    x = tensors("chunk_gated_delta_rule", 70)

    def call(v, **rest):
        o, _ = delta_rule.chunk_gated_delta_rule(v=v.sin(), **rest)
        return (o,)

    found = results(torch.compile(call, fullgraph=True), x, {})
    for y, expected in zip(found, results(call, x, {}), strict=True):
        torch.testing.assert_close(y, expected)


class Names(TorchDispatchMode):
    """Collects the names of operators."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.add(function.name())
        return function(*args, **(kwargs or {}))


def test_plain_calls_do_not_pass_through_the_operator(name):
    with Names() as names:
        results(FUNCTIONS[name], tensors(name, 5), {})
    assert names.found
    assert not [x for x in names.found if x.startswith("quasar::")]


def test_gradients_below_a_dispatch_mode(name):
    x = tensors(name, 5)
    operator = getattr(torch.ops.quasar, name)
    with Names() as names:
        found = results(lambda **y: operator(**y)[:1], x, {})
    assert {f"quasar::{name}", f"quasar::{name}_backward"} <= names.found
    compare(found, results(lambda **y: FUNCTIONS[name](**y)[:1], x, {}))


def test_export(name):
    class Model(torch.nn.Module):
        def forward(self, **x):
            return FUNCTIONS[name](**x, output_final_state=True)

    x = tensors(name, 20)
    program = torch.export.export(Model(), (), x)
    assert f"quasar.{name}.default" in program.graph_module.code
    compare(program.module()(**x), FUNCTIONS[name](**x, output_final_state=True))


def test_only_forward_passes_of_single_tokens_may_be_in_cuda_graphs(name):
    unsafe, operators = torch.Tag.cudagraph_unsafe, torch.ops.quasar
    assert (unsafe in getattr(operators, name).default.tags) == name.startswith("chunk")
    assert unsafe in getattr(operators, f"{name}_backward").default.tags


def test_a_state_that_is_overwritten_breaks_the_graph():
    x, state = tensors("fused_recurrent_quasar", 1), torch.randn(1, 2, 16, 16)
    compiled = torch.compile(fused_recurrent_quasar, backend="aot_eager")
    with torch.no_grad():
        expected = fused_recurrent_quasar(**x, initial_state=state.clone(), inplace_state=True)
        compare(compiled(**x, initial_state=state, inplace_state=True), expected)
    assert torch.equal(state, expected[1])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(fused_recurrent_quasar, fullgraph=True)(**x, inplace_state=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlen": PACKED}, "did you mean cu_seqlens"),
        ({"head_first": False}, "has no argument head_first"),
        ({"cu_seqlens": packed([3])}, "must rise from 0 to T = 5"),
        ({"v": torch.randn(1, 4, 2, 16)}, "v must have shape"),
    ],
)
def test_errors_are_those_of_the_plain_call(name, change, words):
    x = tensors(name, 5) | change
    if name in QUASAR and "v" in change:
        words = "v, like q, must have shape"
    with pytest.raises(ValueError, match=words):
        torch.compile(FUNCTIONS[name], backend="aot_eager")(**x)
