"""When a call becomes a CUDA graph, on a machine without a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.layer import replay


class Owner:
    """What graphs live as long as."""


class Graph:
    """Stands in for a captured call."""

    def __init__(self, forward, x, weights, dtype) -> None:
        self.thread = threading.current_thread()

    def __call__(self, x):
        return x + 1


@pytest.fixture
def captured(monkeypatch):
    """Calls of any tensor may be captured, by `Graph`."""
    monkeypatch.setattr(replay, "_kind", lambda *arguments: arguments[0].shape)
    monkeypatch.setattr(replay, "_Graph", Graph)


def call(owner, launched, size=1):
    def forward(x):
        launched.append(threading.current_thread())
        return x + 1

    return replay.replayed(owner, forward, torch.zeros(size), (), torch.bfloat16, ())


@pytest.mark.usefixtures("captured")
def test_a_thread_s_second_call_is_captured():
    owner, launched = Owner(), []
    call(owner, launched)
    # one after the other, so that they take over one another's numbers
    threads = [threading.Thread(target=call, args=(owner, launched)) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert launched == [threading.current_thread(), *threads]
    for _ in range(3):
        assert call(owner, launched) == 1
    assert len(launched) == 5
    (graph,) = replay._owners[owner].values()
    assert graph.thread is threading.current_thread()


@pytest.mark.usefixtures("captured")
def test_graphs_are_shared_by_threads():
    owner, launched = Owner(), []
    for _ in range(2):
        call(owner, launched)
    other = threading.Thread(target=call, args=(owner, launched))
    other.start()
    other.join()
    assert len(launched) == 1


@pytest.mark.usefixtures("captured")
def test_a_failed_capture_is_said_once_and_gives_the_random_numbers_back(monkeypatch, caplog):
    states = []
    generator = SimpleNamespace(clone_state=lambda: "as it was", graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "default_generators", {-1: generator})  # of a CPU tensor

    def fails(self, *arguments):
        raise RuntimeError("not permitted while a stream is captured")

    monkeypatch.setattr(Graph, "__init__", fails)
    owner, launched = Owner(), []
    for _ in range(4):
        assert call(owner, launched) == 1
    assert len(launched) == 4
    assert states == ["as it was"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.usefixtures("captured")
def test_the_latest_kinds_are_kept():
    owner, launched = Owner(), []
    for size in range(1, 3 * replay.KEPT):
        call(owner, launched, size)
    assert len(replay._owners[owner]) == replay.KEPT
