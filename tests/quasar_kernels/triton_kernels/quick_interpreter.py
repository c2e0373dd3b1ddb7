"""A faster interpreter of Triton, for processes with TRITON_INTERPRET=1.

At each call of one jitted function by another, Triton's interpreter searches all of
`triton.language` for functions to replace, though the launch has replaced them. At each operation
it makes a table of all types, and the types and shapes of operands and result. It checks integers
for overflow by operations of its own. All this took most of the time of these tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_quick() -> None:
    """Remove the repeated work from this process's interpreter."""
    _patch_modules_once()
    _cache_numpy_types()
    _cache_block_types()
    _share_shapes()
    _broadcast_only_different_shapes()
    _check_overflow_by_numpy()


def _patch_modules_once() -> None:
    """Replace a module's functions once per launch, at the first call of one of them."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[str] = set()

    def launch_and_reset(self: Any, *arguments: Any, **names: Any) -> None:
        patched.clear()  # each launch restores the functions at its end
        launch(self, *arguments, **names)

    def patch_once(fn: Any) -> Any:
        if fn.__module__ in patched:
            return interpreter._LangPatchScope()
        patched.add(fn.__module__)
        return patch(fn)

    interpreter.GridExecutor.__call__ = launch_and_reset  # type: ignore[method-assign]
    interpreter._patch_lang = patch_once


def _cache_numpy_types() -> None:
    """Cache the NumPy type of each scalar type."""
    convert, types = interpreter._get_np_dtype, {}

    def numpy_type(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        if isinstance(scalar, tl.pointer_type):
            return convert(scalar)
        if scalar not in types:
            types[scalar] = convert(scalar)
        return types[scalar]

    interpreter._get_np_dtype = numpy_type


def _cache_block_types() -> None:
    """Cache the types of blocks of a shape with another scalar type, and convert none."""
    make, types = tl.block_type.with_element_ty, {}

    def with_element_ty(self: Any, scalar: Any) -> Any:
        if isinstance(scalar, tl.pointer_type):  # it cannot be hashed
            return make(self, scalar)
        key = scalar, *self.shape
        if key not in types:
            types[key] = make(self, scalar)
        return types[key]

    block: Any = tl.block_type
    block.with_element_ty = with_element_ty
    # the interpreter's types are those of the language
    block.to_ir = lambda self, builder: self


def _share_shapes() -> None:
    """Give all tensors of a type the same shape and number of elements."""
    make = tl.tensor.__init__

    def init(self: Any, handle: Any, of: Any) -> None:
        first = of.__dict__.setdefault("first_tensor", self)
        if first is self:
            make(self, handle, of)
            return
        self.handle, self.type, self.dtype = handle, of, first.dtype
        self.shape, self.numel = first.shape, first.numel

    tensor: Any = tl.tensor
    tensor.__init__ = init


def _broadcast_only_different_shapes() -> None:
    """Return blocks of equal shape without making and comparing their common shape."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_different(self: Any, a: Any, b: Any) -> Any:
        if a.type.is_block() and b.type.is_block() and a.type.shape.values == b.type.shape.values:
            return a, b
        return broadcast(self, a, b)

    semantic: Any = TritonSemantic
    semantic.broadcast_impl_value = broadcast_different


def _check_overflow_by_numpy() -> None:
    """Check sums, differences and products of integers of at most 32 bits in one step."""
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, a: Any, b: Any, operation: Any) -> None:
        if a.dtype.int_bitwidth < 64:
            wide = (x.handle.data.astype(np.int64) for x in (a, b))
            exact = operations[operation.__name__](*wide)
            assert a.dtype.get_int_min_value() <= exact.min(), "an integer overflows"
            assert exact.max() <= a.dtype.get_int_max_value(), "an integer overflows"

    semantic: Any = TritonSemantic
    semantic.binary_op_sanitize_overflow_impl = check
