"""A stand-in for a CUDA graph of a call, on a CPU: it computes again, into the same tensors.

What `replay.py` promises of its outputs and inputs can be broken with it as on a GPU: it reads its
inputs where they lay at its capture, or its copies of them, and overwrites its outputs, and what
the other graphs have left, whose memory it shares.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch
from fla.ops.quasar import torch_private
from fla.ops.quasar.layer import replay

CAPTURED: list[Graph] = []
"""Every graph since the last `simulate`."""


class Graph(replay._Graph):
    """Stands in for a captured call; `replays` counts its calls."""

    def __init__(self, compute, inputs, tensors, copied, moves) -> None:
        self.thread, self.replays = threading.current_thread(), 0
        self.addresses = None if moves else replay._addresses_of(inputs)
        if moves:
            inputs = [torch.empty_like(x, dtype=copied(x)) for x in inputs]
        self.copies = inputs if moves else ()

        def run():
            return compute(*inputs, *tensors)

        self.outputs, self.rest = run()
        self.graph = SimpleNamespace(replay=lambda: self.again(run))
        CAPTURED.append(self)

    def again(self, run) -> None:
        self.replays += 1
        for graph in CAPTURED:
            if graph is not self:
                for left in (*graph.copies, *graph.outputs, *graph.rest):
                    if left is not None and left.is_floating_point():
                        left.fill_(float("nan"))
        outputs, rest = run()
        for old, new in zip((*self.outputs, *self.rest), (*outputs, *rest), strict=True):
            if old is not None:
                old.copy_(new)


def simulate(monkeypatch) -> list[Graph]:
    """Let calls on a CPU be replayed, whatever their dtype; return the graphs as they are made."""
    CAPTURED.clear()
    monkeypatch.setattr(replay, "_Graph", Graph)
    monkeypatch.setattr(
        replay,
        "_may_be_replayed",
        lambda x, dtype, most: 0 < x.numel() <= most and not torch.is_grad_enabled(),
    )
    monkeypatch.setattr(torch_private, "raw_stream", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return CAPTURED
