"""When a call becomes a CUDA graph, and what a replay gives, on a machine without a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar import torch_private
from fla.ops.quasar.layer import replay

from tests.quasar_kernels.layer.simulated_graph import Graph, simulate


class Owner:
    """What graphs live as long as."""


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    """The graphs that are made, of calls of any tensor; nothing is recorded for autograd."""
    with torch.no_grad():
        yield simulate(monkeypatch)


def call(owner, launched, size=1, x=None, tensors=(), **kwargs):
    """x + 1, or zeros + 1; `launched` gets the thread of each computation but replays."""
    known = []  # a capture keeps the function: it tells its first call from its replays

    def compute(x, *tensors):
        if not known:
            known.append(launched.append(threading.current_thread()))
        return [sum(tensors, x) + 1], ()

    x = torch.zeros(size) if x is None else x
    outputs, _ = replay.replayed(owner, compute, (x,), tensors, torch.float32, (), **kwargs)
    return outputs[0]


def test_a_thread_s_second_call_is_captured(captured):
    owner, launched = Owner(), []
    call(owner, launched)
    # one after the other, so that they take over one another's numbers
    threads = [threading.Thread(target=no_grad(call), args=(owner, launched)) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert launched == [threading.current_thread(), *threads]
    for _ in range(3):
        assert call(owner, launched) == 1
    assert {graph.thread for graph in captured} == {threading.current_thread()}


def no_grad(function):
    """Threads start with gradients recorded."""

    def run(*args):
        with torch.no_grad():
            function(*args)

    return run


def test_graphs_are_shared_by_threads(captured):
    owner, launched, x = Owner(), [], torch.zeros(1)
    for _ in range(2):
        call(owner, launched, x=x)
    other = threading.Thread(target=no_grad(call), args=(owner, launched, 1, x))
    other.start()
    other.join()
    assert len(launched) == 2
    assert [graph.replays for graph in captured] == [2]


def test_an_input_is_read_where_it_lies_until_it_moves(captured):
    owner, launched, x = Owner(), [], torch.zeros(3)
    for n in range(4):
        assert torch.equal(call(owner, launched, x=x.fill_(n)), torch.full((3,), n + 1.0))
    assert [graph.copies for graph in captured] == [()]
    others = [torch.full((3,), float(n)) for n in range(5)]
    for n, other in enumerate(others):  # launched, captured with a copy, and replayed
        assert torch.equal(call(owner, launched, x=other), torch.full((3,), n + 1.0))
    assert [len(graph.copies) for graph in captured] == [0, 1]
    assert [graph.replays for graph in captured] == [3, 4]
    assert torch.equal(call(owner, launched, x=x.fill_(9)), torch.full((3,), 10.0))
    assert captured[1].replays == 5


def test_inputs_that_move_from_the_start_are_copied_at_once(captured):
    owner, kept = Owner(), [torch.full((3,), float(n)) for n in range(4)]
    for n, x in enumerate(kept):
        assert torch.equal(call(owner, [], x=x), torch.full((3,), n + 1.0))
    assert [len(graph.copies) for graph in captured] == [1]


def test_other_strides_at_one_address_are_another_place(captured):
    owner, x = Owner(), torch.arange(9.0).view(3, 3)
    for view in (x, x, x.t(), x.t(), x):
        assert torch.equal(call(owner, [], x=view), view + 1)
    assert [len(graph.copies) for graph in captured] == [0, 1]


def test_tensors_are_told_by_their_addresses_dtypes_and_strides(captured):
    owner, weight = Owner(), torch.ones(2, 2)
    for changed in (weight, weight.t(), weight.clone(), weight.view(torch.int32)):
        for _ in range(2):
            x = torch.zeros(2, 2)
            assert torch.equal(call(owner, [], x=x, tensors=(changed,)), x + changed + 1)
    assert len(captured) == 4
    weight.fill_(5)  # a value is no part of a kind
    assert torch.equal(call(owner, [], x=x, tensors=(weight,)), x + 6)
    assert len(captured) == 4


def test_what_a_call_returns_is_never_overwritten():
    owner = Owner()
    outputs = [call(owner, [], x=torch.full((3,), float(n))) for n in range(6)]
    for n, y in enumerate(outputs):
        assert torch.equal(y, torch.full((3,), n + 1.0))
    assert len({y.data_ptr() for y in outputs}) == 6


def test_the_rest_is_read_before_it_is_overwritten(captured):
    owner, found = Owner(), []

    def compute(x):
        return [x + 1, None, x + 2], (x * x,)

    for n in range(5):
        x = torch.full((3,), float(n))
        found.append(replay.replayed(owner, compute, (x,), (), torch.float32, (), finish=torch.neg))
    assert captured[0].replays == 4
    for n, ((one, none, two), square) in enumerate(found):
        assert [one[0], none, two[0], square[0]] == [n + 1, None, n + 2, -n * n]


@pytest.mark.parametrize("given", [(), (1,), (0, 2)])
def test_outputs_may_be_missing_one_or_all(captured, given):
    """Weights that are frozen have no gradients, and all of a layer's may be."""
    owner = Owner()

    def compute(x):
        return [x + n if n in given else None for n in range(3)], (x,)

    for n in range(4):
        outputs, rest = replay.replayed(
            owner, compute, (torch.tensor([float(n)]),), (), torch.float32, (), finish=torch.neg
        )
        assert outputs == [n + m if m in given else None for m in range(3)]
        assert rest == -n
    assert captured[0].replays == 3


def test_longer_inputs_and_calls_without_an_owner_are_launched(captured):
    launched, owner = [], Owner()
    for _ in range(3):
        call(owner, launched, 5, most=4)
        call(None, launched, 4, most=4)
    assert len(launched) == 6
    assert not captured


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


def test_the_latest_kinds_are_kept():
    owner, launched = Owner(), []
    for size in range(1, 3 * replay.MAX_GRAPHS):
        call(owner, launched, size)
    assert len(replay._owners[owner]) == replay.MAX_GRAPHS


def test_what_a_graph_holds_lies_where_it_was_made_and_keeps_no_memory():
    x = torch.arange(24.0).view(4, 6)[1:, ::2].t()
    same = torch_private.without_ownership(x)
    assert (same.data_ptr(), same.dtype, same.stride()) == (x.data_ptr(), x.dtype, x.stride())
    assert torch.equal(same, x)
    assert same.untyped_storage()._cdata != x.untyped_storage()._cdata  # another owner


def test_calls_are_launched_where_the_allocator_takes_memory_back(captured, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    owner, launched = Owner(), []
    for _ in range(4):
        assert call(owner, launched) == 1
    assert len(launched) == 4
    assert not captured
