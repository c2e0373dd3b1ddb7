"""When a call becomes a CUDA graph, and the results of replays, on a machine without a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar import torch_private
from fla.ops.quasar.layer import graphs

from tests.quasar_kernels.layer.simulated_graph import Graph, simulate


class Owner:
    """An object whose lifetime bounds that of the graphs."""


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    """Simulate graphs, without autograd; return the list of captured graphs."""
    LAUNCHED.clear()
    with torch.no_grad():
        yield simulate(monkeypatch)


def operation(compute, finish=None):
    """Return an operation of functions that need no settings; copies have the inputs' dtypes."""
    return graphs.Operation(
        lambda settings, inputs, tensors: compute(*inputs, *tensors),
        lambda settings, inputs, tensors, rest: finish(*rest),
        lambda settings, inputs, tensors: [x.dtype for x in inputs],
    )


def add(x, *tensors):
    """Return the sum of all plus 1; record the threads of calls that are no replay."""
    if not Graph.replaying:
        LAUNCHED.append(threading.current_thread())
    return [sum(tensors, x) + 1], ()


ADD = operation(add)
LAUNCHED: list[threading.Thread] = []  # the thread of each launch


def call(owner, size=1, x=None, tensors=(), **kwargs):
    """Return x + 1, or zeros + 1."""
    x = torch.zeros(size) if x is None else x
    outputs, _ = graphs.launch_or_replay(owner, ADD, (), (x,), tensors, torch.float32, **kwargs)
    return outputs[0]


def call_in_thread(*args):
    """Make a call in a new thread, which has autograd on by default, and return the thread."""

    def run():
        with torch.no_grad():
            call(*args)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return thread


def test_a_thread_s_second_call_is_captured(captured):
    owner, launched = Owner(), LAUNCHED
    call(owner)
    # one after the other, so that their ids are reused
    threads = [call_in_thread(owner) for _ in range(3)]
    assert launched == [threading.current_thread(), *threads]
    for _ in range(3):
        assert call(owner) == 1
    assert {graph.thread for graph in captured} == {threading.current_thread()}


def test_threads_share_graphs(captured):
    owner, launched, x = Owner(), LAUNCHED, torch.zeros(1)
    for _ in range(2):
        call(owner, x=x)
    call_in_thread(owner, 1, x)
    assert len(launched) == 2
    assert [graph.replays for graph in captured] == [2]


def test_a_graph_reads_its_input_without_a_copy_until_the_address_changes(captured):
    owner, x = Owner(), torch.zeros(3)
    for n in range(4):
        assert torch.equal(call(owner, x=x.fill_(n)), torch.full((3,), n + 1.0))
    assert [graph.copies for graph in captured] == [()]
    others = [torch.full((3,), float(n)) for n in range(5)]
    for n, other in enumerate(others):  # launched, captured with a copy, and replayed
        assert torch.equal(call(owner, x=other), torch.full((3,), n + 1.0))
    assert [len(graph.copies) for graph in captured] == [0, 1]
    assert [graph.replays for graph in captured] == [3, 4]
    assert torch.equal(call(owner, x=x.fill_(9)), torch.full((3,), 10.0))
    assert captured[1].replays == 5


def test_inputs_whose_addresses_differ_from_the_start_are_copied_at_once(captured):
    owner, inputs = Owner(), [torch.full((3,), float(n)) for n in range(4)]
    for n, x in enumerate(inputs):
        assert torch.equal(call(owner, x=x), torch.full((3,), n + 1.0))
    assert [len(graph.copies) for graph in captured] == [1]


def test_other_strides_at_one_address_count_as_another_address(captured):
    owner, x = Owner(), torch.arange(9.0).view(3, 3)
    for view in (x, x, x.t(), x.t(), x):
        assert torch.equal(call(owner, x=view), view + 1)
    assert [len(graph.copies) for graph in captured] == [0, 1]


def test_tensors_with_other_addresses_dtypes_or_strides_need_another_graph(captured):
    owner, weight = Owner(), torch.ones(2, 2)
    for changed in (weight, weight.t(), weight.clone(), weight.view(torch.int32)):
        for _ in range(2):
            x = torch.zeros(2, 2)
            assert torch.equal(call(owner, x=x, tensors=(changed,)), x + changed + 1)
    assert len(captured) == 4
    weight.fill_(5)  # a graph does not depend on values
    assert torch.equal(call(owner, x=x, tensors=(weight,)), x + 6)
    assert len(captured) == 4


def test_a_replay_does_not_overwrite_earlier_outputs():
    owner = Owner()
    outputs = [call(owner, x=torch.full((3,), float(n))) for n in range(6)]
    for n, y in enumerate(outputs):
        assert torch.equal(y, torch.full((3,), n + 1.0))
    assert len({y.data_ptr() for y in outputs}) == 6


def test_finish_reads_the_rest_before_it_is_overwritten(captured):
    owner, results = Owner(), []

    def compute(x):
        return [x + 1, None, x + 2], (x * x,)

    both = operation(compute, torch.neg)
    for n in range(5):
        x = (torch.full((3,), float(n)),)
        results.append(graphs.launch_or_replay(owner, both, (), x, (), torch.float32))
    assert captured[0].replays == 4
    for n, ((one, none, two), square) in enumerate(results):
        assert [one[0], none, two[0], square[0]] == [n + 1, None, n + 2, -n * n]


def test_long_inputs_calls_without_an_owner_and_other_allocators_are_launched(
    captured, monkeypatch
):
    owner = Owner()
    for _ in range(3):
        call(owner, 5, max_elements=4)
        call(None, 4, max_elements=4)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    for _ in range(3):
        call(owner)
    assert len(LAUNCHED) == 9
    assert not captured


def test_a_failed_capture_is_logged_once_and_resets_the_generator(monkeypatch, caplog):
    states = []
    generator = SimpleNamespace(clone_state=lambda: "clone", graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "default_generators", {-1: generator})  # of a CPU tensor

    def fails(self, *arguments):
        raise RuntimeError("not permitted while a stream is captured")

    monkeypatch.setattr(Graph, "__init__", fails)
    owner, launched = Owner(), LAUNCHED
    for _ in range(4):
        assert call(owner) == 1
    assert len(launched) == 4
    assert states == ["clone"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_owner_has_a_limited_number_of_graphs():
    owner = Owner()
    for size in range(1, 3 * graphs.MAX_GRAPHS):
        call(owner, size)
    assert len(graphs._owners[owner]) == graphs.MAX_GRAPHS


def test_tensors_without_ownership_have_the_same_address_and_layout():
    x = torch.arange(24.0).view(4, 6)[1:, ::2].t()
    same = torch_private.without_ownership(x)
    assert (same.data_ptr(), same.dtype, same.stride()) == (x.data_ptr(), x.dtype, x.stride())
    assert torch.equal(same, x)
    assert same.untyped_storage()._cdata != x.untyped_storage()._cdata  # another owner
