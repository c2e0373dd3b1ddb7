"""Public functions make the tensors' device current, on a machine without a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar import chunk_quasar, fused_recurrent_quasar, torch_private
from fla.ops.quasar.device import on_its_device
from fla.ops.quasar.forward_substitution import quasar_forward_substitution
from fla.ops.quasar.gate import fused_quasar_gate
from fla.ops.quasar.layer import graphs
from fla.ops.quasar.layer.gate_and_norm import gate_and_norm
from fla.ops.quasar.layer.kernels import causal_conv_silu, gated_rmsnorm


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on GPU 1."""

    index = 1  # type: ignore[assignment]
    is_cuda = True

    @property
    def device(self):
        return torch.device("cuda", self.index)

    def get_device(self):
        return self.index


class OnFirstGpu(OnGpu):
    """A CPU tensor that claims to be on GPU 0."""

    index = 0


def on_gpu(*shape, kind=OnGpu):
    return torch.rand(*shape).as_subclass(kind)


class EnteredError(Exception):
    """A device was made current."""


@pytest.fixture
def devices(monkeypatch):
    """The stack of current devices, of which the first is 0."""
    current = [0]

    @contextmanager
    def device(wanted):
        current.append(wanted.index)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    return current


@pytest.fixture
def refused(monkeypatch):
    """Let a call raise when it makes a device current; it must do nothing else before."""

    def device(wanted):
        raise EnteredError(wanted.index)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)


def test_the_device_of_the_first_tensor_is_current_during_the_call(devices):
    @on_its_device
    def stack(*args, **kwargs):
        return list(devices)

    first, second = on_gpu(2, kind=OnFirstGpu), on_gpu(2)
    assert stack(None, second, first) == [0, 1]
    assert stack(3, x=second) == [0, 1]
    assert stack(first, second) == stack(torch.ones(1), second) == stack(2) == [0]
    assert devices == [0]


def test_calls_with_cpu_tensors_do_not_use_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("CUDA is used"))
    assert on_its_device(lambda x: x + 1)(torch.ones(1)) == 2


def qkv():
    return [on_gpu(1, 5, 2, 16) for _ in range(3)]


ENTRIES = {
    "layer": lambda: QuasarAttention(32, 16, 2)(on_gpu(1, 5, 32)),
    "layer, by keyword": lambda: QuasarAttention(32, 16, 2)(hidden_states=on_gpu(1, 5, 32)),
    "chunk": lambda: chunk_quasar(*qkv(), on_gpu(2)),
    "recurrent": lambda: fused_recurrent_quasar(*qkv(), on_gpu(2)),
    "gate": lambda: fused_quasar_gate(on_gpu(5, 2), on_gpu(2)),
    "inverse": lambda: quasar_forward_substitution(on_gpu(3, 16, 16)),
    "convolution": lambda: causal_conv_silu(on_gpu(5, 8), on_gpu(8, 4)),
    "norm": lambda: gated_rmsnorm(on_gpu(5, 8), on_gpu(5, 8), on_gpu(8), 1e-5),
    "gate and norm": lambda: gate_and_norm(
        on_gpu(5, 2, 8), on_gpu(5, 8), on_gpu(16, 8), on_gpu(16), on_gpu(8), 1e-5
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.usefixtures("refused")
def test_every_public_function_makes_the_device_current_first(entry):
    with pytest.raises(EnteredError, match="1"):
        ENTRIES[entry]()


def test_a_graph_belongs_to_one_device(monkeypatch):
    monkeypatch.setattr(graphs, "_PLAIN", {OnGpu, OnFirstGpu})
    monkeypatch.setattr(torch_private, "raw_stream", lambda _: 0)
    x, weight = torch.rand(1, 5, 32), torch.rand(32, 32)
    with torch.no_grad():
        first, second, third = (
            graphs._graph_key([x.as_subclass(kind)], [weight.as_subclass(kind)], torch.bfloat16, ())
            for kind in (OnGpu, OnFirstGpu, OnGpu)
        )
    assert first == third
    assert None not in (first, second)
    assert first != second


def test_tensors_on_several_devices_are_refused(devices):
    inputs = [*qkv(), on_gpu(2), on_gpu(1, 2, 16, 16)]
    for n in range(1, len(inputs)):
        mixed = [x.as_subclass(OnFirstGpu) if i == n else x for i, x in enumerate(inputs)]
        with pytest.raises(ValueError, match="like the other arguments"):
            chunk_quasar(*mixed)
