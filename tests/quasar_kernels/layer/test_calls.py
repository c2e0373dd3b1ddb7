"""The host's work in a call of the layer on Hopper: Python calls, counted with a fake driver."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar import backend as backends
from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda import driver
from fla.ops.quasar.cuda.program import LoadedProgram, Variant
from fla.ops.quasar.cuda.scan import scan_backward, scan_forward
from fla.ops.quasar.layer import graphs, hopper, paths, products, states, weight_tiles, wide
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.wrapped import plain_weights
from fla.ops.quasar.triton_kernels.launch import Launcher

from quasar_kernels.contract import OVERLAY
from tests.quasar_kernels.layer.simulated_graph import Graph

TOKENS, SEGMENTS = 1024, 4
BF16 = torch.bfloat16
SCAN = ["segment_map", "segment_scan", "segment_output"]
GRADIENTS = [f"{name}_gradient" for name in ("state", "input")]
GRADIENTS += ["state_checkpoint", "state_gradient_map", "gradient_scan"]


class Known(dict):
    """Arguments that were serialized before: a GPU's allocator returns the same addresses."""

    def get(self, *_):
        return b""


class Captured(Graph):
    """A fake graph, of which a replay launches nothing."""

    def _replay(self) -> None:
        pass


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Let CPU tensors pass for those of a Hopper GPU; return the list of launched kernels."""
    names: list[str] = []
    fake = SimpleNamespace(cuLaunchKernel=lambda name, *_: names.append(name) or 0)
    operator = scan_forward.variant_for(None, BF16, 8, 64)
    for program, variant, kernels in (
        (hopper.PROGRAM, Variant(None, BF16), ["pack_weights", "projection", "gated_output"]),
        (wide.PROGRAM, Variant(None, BF16), ["wide_projection"]),
        (scan_forward.PROGRAM, operator, SCAN),
        (scan_backward.PROGRAM, operator, GRADIENTS),
    ):
        loaded = {name: driver.Kernel(name, 384, 0, 1, 0, 0) for name in kernels}
        monkeypatch.setattr(
            program, "_entries", {variant: LoadedProgram(variant, loaded, 132, True)}
        )
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    monkeypatch.setattr(torch_private, "raw_stream", lambda _: 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as a CPU tensor's get_device
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(hopper, "_has_hopper", lambda _: True)
    monkeypatch.setattr(paths, "MIN_WIDE_TILES", 1)
    monkeypatch.setattr(products, "_HAS_OUT_DTYPE", False)  # which CPUs lack
    monkeypatch.setattr(Launcher, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(weight_tiles, "_serialized", Known())
    monkeypatch.setattr(graphs, "_Graph", Captured)
    for module, maps in ((scan_forward, "tensor_maps"), (scan_backward, "tensor_maps")):
        monkeypatch.setattr(module, maps, lambda *_: b"")  # likewise known by their addresses
    monkeypatch.setattr(wide, "_maps", lambda *_: b"")
    return names


@pytest.fixture
def long(monkeypatch) -> None:
    """Give a short call the path of one of a million tokens."""
    monkeypatch.setattr(graphs, "MAX_ELEMENTS", 100)
    monkeypatch.setattr(scan_forward, "LONG", 1)
    monkeypatch.setattr(scan_forward, "_cut", lambda *_: (SEGMENTS, TOKENS // SEGMENTS))
    monkeypatch.setenv("QUASAR_KEEP_MIB", "0")


def count(run) -> tuple[Counter[str], set[str]]:
    """Return the overlay's functions that `run` calls, with their numbers, and their files."""
    calls: Counter[str] = Counter()
    files = set()

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(OVERLAY)):
            calls[f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_name}"] += 1
            files.add(code.co_filename)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls, files


def call(layer, x):
    with torch.autocast("cpu", BF16):
        return layer(x)[0]


def differentiate(layer, x):
    """Return a function that runs the backward pass of a new call."""
    y = call(layer, x)
    inputs, dy = [x, *layer.parameters()], torch.ones_like(y)
    return lambda: torch.autograd.grad(y, inputs, dy)


class OnlyRank:
    """The slice of a group's only rank, which has no neighbours."""

    bounds = final = None

    def gather_halo(self, x):
        return x[0, :0]

    def replace_first_tokens(self, *_):
        pass

    def forward(self, scan, backend, save):
        return backends.scan_forward(scan, False, backend=backend, training=save)


def test_frozen_weights_on_a_rank_use_the_fused_kernels(launched):
    layer, x = QuasarAttention(512, 64, 8).requires_grad_(False), torch.randn(1, TOKENS, 512)
    settings = Call(8, 64, layer.norm_eps, BF16, None, "auto", False)
    states.run_on_rank(layer, settings, x, plain_weights(layer), OnlyRank(), keep=False)
    assert launched[:2] == ["pack_weights", "projection"], launched
    assert launched[-1] == "gated_output", launched


@pytest.mark.usefixtures("long")
def test_a_long_call(launched):
    layer, x = QuasarAttention(512, 64, 8), torch.randn(1, TOKENS, 512)
    call(layer, x)
    launched.clear()
    calls, files = count(lambda: call(layer, x))
    assert launched == ["pack_weights", "projection", *SCAN, *SCAN, "gated_output"]
    assert calls.total() <= 50, calls
    assert len(files) <= 13, sorted(files)
    run = differentiate(layer, x.requires_grad_())
    run()
    run = differentiate(layer, x)
    launched.clear()
    calls, _ = count(run)
    assert launched.count("input_gradient") == 1, launched
    assert calls.total() <= 100, calls


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no_grad"])
def test_a_replayed_call(launched, recorded):
    layer, x = QuasarAttention(512, 64, 8), torch.randn(1, 512, 512)
    with torch.set_grad_enabled(recorded):
        for _ in range(2):
            call(layer, x)
        launched.clear()
        calls, _ = count(lambda: call(layer, x))
    assert not launched
    assert calls.total() <= 20, calls


def test_a_replayed_backward_pass(launched):
    layer, x = QuasarAttention(512, 64, 8), torch.randn(1, 512, 512, requires_grad=True)
    # dy has another address in each call, so the second call's graph reads copies
    *earlier, run = [differentiate(layer, x) for _ in range(4)]
    for one in earlier:
        one()
    launched.clear()
    calls, _ = count(run)
    assert not launched
    assert calls.total() <= 20, calls
