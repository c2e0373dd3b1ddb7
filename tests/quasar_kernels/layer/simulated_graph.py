"""A fake CUDA graph of a call, on a CPU: a replay computes the call again into the same tensors.

As on a GPU, it reads its inputs at their addresses during the capture, or its copies of them, and
overwrites its outputs and the tensors of the other graphs, whose memory it shares. So errors in
`graphs.py` show.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch
from fla.ops.quasar import torch_private
from fla.ops.quasar.layer import graphs

CAPTURED: list[Graph] = []
"""Every graph since the last `simulate`."""


class Graph(graphs._Graph):
    """A fake captured call; `replays` counts its replays."""

    replaying = False

    def __init__(self, operation, settings, inputs, tensors, addresses) -> None:
        self.thread, self.replays = threading.current_thread(), 0
        self.operation, self.addresses = operation, addresses
        if addresses is None:
            dtypes = operation.input_dtypes(settings, inputs, tensors)
            inputs = [
                torch.empty_like(x, dtype=dtype) for x, dtype in zip(inputs, dtypes, strict=True)
            ]
        self.copies = inputs if addresses is None else ()
        self._compute = lambda: operation.compute(settings, inputs, tensors)
        self.outputs, self.rest = self._compute()
        self.graph = SimpleNamespace(replay=self._replay)
        CAPTURED.append(self)

    def _replay(self) -> None:
        self.replays += 1
        for graph in CAPTURED:
            if graph is not self:
                for x in (*graph.copies, *graph.outputs, *graph.rest):
                    if x is not None and x.is_floating_point():
                        x.fill_(float("nan"))
        Graph.replaying = True
        outputs, rest = self._compute()
        Graph.replaying = False
        for old, new in zip((*self.outputs, *self.rest), (*outputs, *rest), strict=True):
            if old is not None:
                old.copy_(new)


def simulate(monkeypatch) -> list[Graph]:
    """Let calls on a CPU be replayed, with any dtype; return the list to which graphs are added."""
    CAPTURED.clear()
    monkeypatch.setattr(graphs, "_Graph", Graph)
    monkeypatch.setattr(
        graphs,
        "_may_be_replayed",
        lambda x, dtype, most: 0 < x.numel() <= most and not torch.is_grad_enabled(),
    )
    monkeypatch.setattr(torch_private, "raw_stream", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return CAPTURED
