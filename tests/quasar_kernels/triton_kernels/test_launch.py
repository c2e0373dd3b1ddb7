"""`Launcher`: which launches share a compiled kernel, and which ones Triton does."""

from __future__ import annotations

import pytest
import torch
from fla.ops.quasar.triton_kernels.launch import Launcher


class Compiled:
    """A fake compiled kernel, as Triton returns it; records its launches."""

    packed_metadata = ()

    def __init__(self, accepts: int) -> None:
        self.accepts = accepts
        self.launches: list[tuple[object, tuple[object, ...]]] = []

    def __getitem__(self, grid):
        def run(*arguments):
            if len(arguments) != self.accepts:
                raise TypeError("function takes another number of arguments")
            self.launches.append((grid, arguments))

        return run


class Kernel:
    """A fake Triton kernel; records the launches that Triton binds."""

    def __init__(self, compile_one) -> None:
        self.compile_one = compile_one
        self.bound: list[object] = []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.bound.append((grid, arguments, options))
            return self.compile_one()

        return run


STORAGE = torch.zeros(64)
KINDS = [
    (STORAGE, 5, 0.5),
    (STORAGE[1:], 5, 0.5),
    (STORAGE.double(), 5, 0.5),
    (STORAGE, 1, 0.5),
    (STORAGE, 16, 0.5),
    (STORAGE, 1 << 31, 0.5),
    (STORAGE, 1 << 32, None),
    (STORAGE, None, 0.5),
]


def test_the_second_launch_with_a_key_is_not_bound():
    compiled = Compiled(accepts=3)
    kernel = Kernel(lambda: compiled)
    launch = Launcher(kernel)
    launch((1, 2, 3), (STORAGE, 5), (64,), num_warps=4)
    launch((4, 5, 6), (STORAGE[32:], 7), (64,), num_warps=4)
    assert kernel.bound == [((1, 2, 3), (STORAGE, 5, 64), {"num_warps": 4})]
    ((grid, arguments),) = compiled.launches
    assert grid == (4, 5, 6)
    assert arguments[0].data_ptr() == STORAGE[32:].data_ptr()
    assert arguments[1:] == (7, 64)


def test_each_kind_of_arguments_has_a_key():
    kernel = Kernel(lambda: Compiled(accepts=4))
    launch = Launcher(kernel)
    for arguments in KINDS * 2:
        launch((1, 1, 1), arguments, (64,), num_warps=4)
    assert len(kernel.bound) == len(KINDS)


def test_constants_and_options_are_part_of_the_key():
    kernel = Kernel(lambda: Compiled(accepts=2))
    launch = Launcher(kernel)
    for constant, warps in ((64, 4), (32, 4), (64, 2)) * 2:
        launch((1, 1, 1), (STORAGE,), (constant,), num_warps=warps)
    assert len(kernel.bound) == 3


@pytest.mark.parametrize("compile_one", [lambda: Compiled(accepts=1), lambda: None])
def test_without_a_callable_kernel_triton_does_all_launches(compile_one):
    # an older Triton takes no constexprs there; its interpreter returns nothing
    kernel = Kernel(compile_one)
    launch = Launcher(kernel)
    for _ in range(3):
        launch((1, 1, 1), (STORAGE,), (64,), num_warps=4)
    assert len(kernel.bound) == 3
