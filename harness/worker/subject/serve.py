"""The subject: the process that holds the code under test and calls it for the referee.

It is forked from the referee's process before that has a secret: the subject has neither the nonce
nor the descriptor of the reply, and no expected value. The referee checks every reply.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from harness.measuring.job import Exit
from harness.measuring.process import die_with_parent, hide
from harness.worker.chain import MAX_CALLS, SCALED, ChainMaps, Link, drawn, fill
from harness.worker.channel import Channel, SubjectProxy, WireError
from harness.worker.failures import WorkerError, as_worker_error
from harness.worker.machine.telemetry import quiet_snapshot
from harness.worker.subject.confine import give_up_privileges
from harness.worker.subject.timing import (
    recording,
    synchronize,
    tampered,
    time_layer,
)
from harness.worker.subject.tree import load_tree
from harness.workload import WORKLOAD

OPERANDS = ("q", "k", "v", "beta")
Tensors = dict[str, Tensor]


@contextmanager
def _poisoned() -> Iterator[None]:
    """Make torch fill new memory with NaN, so that unwritten elements are visible."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class InProcessSubject:
    """The code under test in this process, and the tensors that it is called on."""

    def __init__(self, operator: Any, layer_class: Any, device: torch.device) -> None:
        self._operator, self._layer_class, self._device = operator, layer_class, device
        self._held: Tensors = {}
        self._layer: Any = None

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Store new values, in the same memory if shape and dtype are unchanged.

        The tensors' version counters stay, so that code cannot recognise new values by them.
        """
        for name, new in tensors.items():
            old = self._held.get(name)
            if old is not None and (old.shape, old.dtype) == (new.shape, new.dtype):
                old.data.copy_(new)
                continue
            tensor = new.detach().to(self._device, copy=True)
            # The timed calls record gradients on CUDA.
            self._held[name] = tensor.requires_grad_(name != "x" and self._device.type == "cuda")

    def draw(self, name: str, shape: Sequence[int], seed: int) -> None:
        """Store the values that the referee draws from the same seed, as `put` stores tensors."""
        old = self._held.get(name)
        if old is not None and (old.shape, old.dtype) == (torch.Size(shape), torch.float32):
            fill(old.data, seed)  # in place, because a new tensor takes 2 GB at a million tokens
        else:
            self.put({name: drawn(shape, seed, self._device)})

    def fetch(self, names: Sequence[str], rows: Sequence[int] | None = None) -> Tensors:
        """Return the stored tensors, in full or only some rows of the token dimension."""
        tensors = {name: self._held[name].detach() for name in names}
        return tensors if rows is None else {n: t[:, rows] for n, t in tensors.items()}

    def operate(self, *, initial: bool = False, final: bool = False) -> Tensors:
        """Call the operator; return `o` `[1, T, H, S]` and, with `final`, any `state`.

        The output of the previous call is stored as `earlier`.
        """
        options: dict[str, Any] = {"output_final_state": True} if final else {}
        if initial:
            options["initial_state"] = self._held["initial"]
        # The caller's stream reads the result at once. It does not wait for other streams, so an
        # operator that computes there without synchronizing fails the check.
        with recording(self._device), _poisoned():
            o, state = self._operator(*(self._held[name] for name in OPERANDS), **options)
        if "o" in self._held:
            self._held["earlier"] = self._held["o"]
        self._held["o"] = o.detach()
        return {"o": o.detach()} | ({} if state is None else {"state": state.detach()})

    def build(self, weights: Mapping[str, Tensor] | None = None) -> Tensors:
        """Make a new layer, with these weights if given; return all its weights by name.

        Raises a WorkerError if the layer has no such weight.
        """
        self._layer = self._layer_class(**WORKLOAD.layer_arguments()).to(self._device)
        self._set(weights or {})
        return self.weights()

    def _set(self, weights: Mapping[str, Tensor]) -> None:
        own = self._layer.state_dict()
        for name, value in weights.items():
            if name not in own or own[name].shape != value.shape:
                raise WorkerError(f"the layer lacks the weight {name} {list(value.shape)}", "gate")
            own[name].data.copy_(value)

    def weights(self) -> Tensors:
        """Return the layer's weights as they are now."""
        return {name: value.detach() for name, value in self._layer.state_dict().items()}

    def forward(self) -> Tensors:
        """Call the layer on x; return `y`."""
        with recording(self._device), _poisoned():
            return {"y": self._layer(self._held["x"])[0].detach()}

    def gradients(self) -> Tensors:
        """Return the gradients of sum(layer(x) * toward) by x, as `input`, and by all weights."""
        x = self._held["x"].detach().clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
            y = self._layer(x)[0]
        torch.autograd.backward((y.float() * self._held["toward"]).sum())
        gradients = {name: p.grad for name, p in self._layer.named_parameters()} | {"input": x.grad}
        return {name: grad for name, grad in gradients.items() if grad is not None}

    def time(self, length: int) -> dict[str, Any]:
        """Run the validator's loop; return the fields of `timing.LoopResult`.

        The layer, its input and last output are kept. Raises a WorkerError for invalid figures.
        """

        def keep(layer: Any, x: Tensor, y: Tensor) -> None:
            self._layer, self._held = layer, {"x": x, "y": y}

        result = time_layer(self._layer_class, length, self._device, inspect=keep)
        return result.model_dump(mode="json")

    def prepare(
        self, weights: Mapping[str, Tensor], length: int, seed: int, size: float, maps_seed: int
    ) -> dict[str, Any]:
        """Set the layer's weights, by name, and a new x; call it until it is warm.

        `seed` is of x `[1, length, hidden_size]` fp32; `size` and `maps_seed` are of the chain's
        maps. Raises a WorkerError if the layer has no such weight.
        """
        if self._layer is None:
            self.build()
        self._set(weights)
        self.draw("x", (WORKLOAD.batch_size, length, WORKLOAD.hidden_size), seed)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        for call in range(WORKLOAD.warmup_calls):
            self.call()
            if call == 0:
                synchronize(self._device)
                first_call = time.monotonic() - started
        synchronize(self._device)
        vram = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0
        maps = ChainMaps.draw(length, size, maps_seed, self._device)
        own = self._layer.state_dict()
        self._link = Link(maps, [own[name].data for name in SCALED], MAX_CALLS)
        return {"vram_bytes": vram, "first_call_seconds": first_call}

    def call(self) -> None:
        """Call the layer on x as the validator's loop does; its output is stored as `y`."""
        with recording(self._device):
            self._held["y"] = self._layer(self._held["x"])[0].detach()

    def chain(self, seed: int, calls: int) -> Tensors:
        """Call the layer in a chain; return its digests `[calls, channels]`.

        Each input depends on the output of the call before, and on keys of this seed.
        """
        self._link.start(seed, calls)
        for _ in range(calls):
            self.call()
            self._link(self._held["y"])
        return {"digests": self._link.digests[:calls].to(torch.int8)}

    def repeat(self, calls: int) -> None:
        """Call the layer on x `calls` times without links, and wait for the device."""
        for _ in range(calls):
            self.call()
        synchronize(self._device)

    def tampered(self) -> dict[str, list[str]]:
        """Return the `names` of the guarded functions that the code under test replaced."""
        return {"names": tampered()}


class _Server:
    """Answers requests: `load` and `use` first, then methods of the `InProcessSubject`."""

    _local: InProcessSubject | None = None

    def load(self, tree: str) -> dict[str, Any]:
        """Import the tree; return the fields of `tree.Imported`."""
        self._loaded = load_tree(Path(tree))
        return self._loaded.imported.model_dump()

    def use(self, device: str, single: bool) -> dict[str, Any]:
        """Select the device; return the GPU's state before a timed run.

        `single` is true for a correctness check, which is not timed and uses one CPU thread.
        """
        place = torch.device(device)
        if place.type == "cpu" and single:
            torch.set_num_threads(1)  # small tensors, for which more threads only wait
        self._local = InProcessSubject(self._loaded.operator, self._loaded.layer_class, place)
        timed = place.type == "cuda" and not single
        gpu = quiet_snapshot() if timed else None
        return {"gpu": None if gpu is None else gpu.model_dump(mode="json")}

    def answer(self, op: str, fields: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        """Return the result of an operation; the referee, which names it, is trusted."""
        operation = getattr(self._local or self, op)
        return (operation(tensors, **fields) if tensors else operation(**fields)) or {}


def fork_subject() -> SubjectProxy:
    """Fork the subject from this process, which has imported torch and holds no secret yet.

    Call this before the job is read, CUDA is initialised or a thread is started.
    """
    # not `closerange`: before Linux 5.9 it tries every number, and containers often allow 2**30
    open_files = [int(name) for name in os.listdir("/proc/self/fd")]
    referee_end, subject_end = socket.socketpair()
    hide()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become_subject(parent, subject_end, {*open_files, referee_end.fileno()})
        finally:  # never returns to the referee's code or runs exit handlers
            os._exit(Exit.CRASH)
    subject_end.close()
    return SubjectProxy(Channel(referee_end), pid)


def _become_subject(parent: int, end: socket.socket, open_files: set[int]) -> None:
    die_with_parent()
    if os.getppid() != parent:
        os._exit(Exit.PARENT_GONE)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in open_files - {0, 1, 2, end.fileno()}:
        with suppress(OSError):  # the list contains the number of its own, closed descriptor
            os.close(number)
    hide(hidden=False)
    give_up_privileges()
    _serve(Channel(end))


def _serve(channel: Channel) -> NoReturn:
    """Serve the referee's requests until it closes the socket."""
    server = _Server()
    try:
        while True:
            fields, tensors = channel.receive(1 << 62)
            try:
                answer = server.answer(fields.pop("op"), fields, tensors)
            except Exception as error:  # the code under test may raise anything
                if not isinstance(error, WorkerError):
                    traceback.print_exc()
                failure = as_worker_error(error)
                channel.send({"failure": {"reason": str(failure), "kind": failure.kind}})
                continue
            contents = {name: a for name, a in answer.items() if isinstance(a, Tensor)}
            channel.send({n: a for n, a in answer.items() if n not in contents}, contents)
    except (WireError, OSError):
        sys.exit(0)
