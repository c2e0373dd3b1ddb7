"""Launcher and compile_ahead with a kernel that only records its compilations and launches."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.triton_kernels import launch
from fla.ops.quasar.triton_kernels.launch import Launcher, compile_ahead

from tests.processes import HANG


class Kernel:
    """A jitted function `(x, n, A, B)` with constexprs A and B; compilations run `compile`."""

    arg_names = ("x", "n", "A", "B")

    def __init__(self, compile=lambda: None):
        self.compile, self.compiled, self.launched = compile, set(), []
        self.device_caches = {-1: ()}  # by device

    def warmup(self, *arguments, grid, **options):
        assert arguments[0].is_meta
        self.compile()
        self.compiled.add((arguments[0].dtype, *arguments[1:], *options.items()))
        return self

    def __getitem__(self, grid):
        def run(x, *arguments, **options):
            key = (x.dtype, *arguments, *options.items())
            self.launched.append((key, key in self.compiled))
            return SimpleNamespace()  # without compiled code, so Triton does the next launch, too

        return run


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(launch, "_known", set())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # that of CPU tensors
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def run_all(launcher, x, counts=(1, 16)):
    for n in counts:
        launcher((n, 1, 1), (x, n), {"B": 3, "A": 2}, num_warps=4)


def test_a_launch_waits_for_its_own_compilation_only():
    allowed = {torch.float32: threading.Event(), torch.float16: threading.Event()}
    waiting = []

    def compile_when_allowed():
        kind = waiting.pop(0)
        assert allowed[kind].wait(HANG)

    kernel = Kernel(compile_when_allowed)
    launcher = Launcher(kernel)
    for kind in allowed:
        waiting.append(kind)
        compile_ahead(kind, run_all, launcher, torch.zeros(8, dtype=kind), (1,))
        compile_ahead(kind, run_all, launcher, torch.zeros(8, dtype=kind), (1,))  # known
    assert not kernel.launched
    allowed[torch.float16].set()
    run_all(launcher, torch.zeros(8, dtype=torch.float16), (1,))
    allowed[torch.float32].set()
    run_all(launcher, torch.zeros(8), (1,))
    constants = (1, 2, 3, ("num_warps", 4))
    assert kernel.launched == [
        ((torch.float16, *constants), True),
        ((torch.float32, *constants), True),
    ]


def test_after_a_failed_compilation_the_launch_reports_it():
    kernel = Kernel(lambda: 1 / 0)
    launcher = Launcher(kernel)
    compile_ahead("any", run_all, launcher, torch.zeros(8))
    run_all(launcher, torch.zeros(8))
    assert [compiled for _, compiled in kernel.launched] == [False, False]


def test_nothing_is_compiled_ahead_during_a_capture(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    compile_ahead("any", run_all, Launcher(kernel), torch.zeros(8))
    assert not launch._known


@pytest.mark.parametrize(
    ("x", "n"), [(torch.zeros(9)[1:], 1), (torch.zeros(8).half(), 1), (torch.zeros(8), 2)]
)
def test_another_kind_of_argument_is_another_key(x, n):
    launcher = Launcher(Kernel())
    for arguments in ((torch.zeros(8), 1), (x, n), (torch.ones(8), 1)):
        launcher((1, 1, 1), arguments, (2, 3), num_warps=4)
    assert len(launcher._compiled) == 2
