"""The bounds of packed sequences on the host, and the tables of their segments."""

import numpy as np
import torch
from fla.ops.quasar.segments import host_bounds, packed_table


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_bounds_are_copied_once_for_each_version(monkeypatch):
    copies, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: copies.append(x) or tolist(x))
    bounds, other = (torch.tensor([0, 3, 5]).as_subclass(OnGpu) for _ in range(2))
    assert [host_bounds(bounds) for _ in range(3)] == [(0, 3, 5)] * 3
    assert len(copies) == 1
    bounds[1] = 4
    assert [host_bounds(bounds) for _ in range(3)] == [(0, 4, 5)] * 3
    assert host_bounds(other) == (0, 3, 5)
    assert len(copies) == 3
    bounds.copy_(other)
    assert host_bounds(bounds) == (0, 3, 5)


def test_bounds_on_a_cpu_may_change_without_a_new_version():
    shared = np.array([0, 3, 5])
    bounds = torch.from_numpy(shared)
    assert host_bounds(bounds) == (0, 3, 5)
    shared[1] = 4
    assert host_bounds(bounds) == (0, 4, 5)


def test_bounds_without_a_version_are_copied_at_each_call():
    with torch.inference_mode():
        bounds = torch.tensor([0, 3, 5])
        assert host_bounds(bounds) == (0, 3, 5)
        bounds[1] = 4
        assert host_bounds(bounds) == (0, 4, 5)


def test_equal_bounds_share_a_table():
    cpu = torch.device("cpu")
    first, second = packed_table([0, 3, 5], 2, cpu), packed_table((0, 3, 5), 2, cpu)
    assert first.table is second.table
    assert first.table.tolist() == [[0, 0, 2, 1], [0, 2, 1, 2], [1, 3, 2, 3]]
    assert first.first.tolist() == [0, 2, 3]
    assert packed_table([0, 3, 5], 3, cpu).table.tolist() == [[0, 0, 3, 3], [1, 3, 2, 3]]
