"""A faster interpreter of Triton, for processes with TRITON_INTERPRET=1.

At each launch and each call of one jitted function by another, Triton's interpreter searches all of
`triton.language` for functions to replace. At each operation it determines the types of operands
and result, copies scalars to whole blocks, and checks integers for overflow by further operations.
It scans a block element by element.
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
    _compute_by_numpy()
    _call_without_wrappers()
    _skip_checks_of_handles()
    _scan_all_rows_at_once()


def _patch_modules_once() -> None:
    """Replace the language's functions at the first call of each module, and never restore them."""
    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn: Any) -> Any:
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            patch(fn)
        return interpreter._LangPatchScope()

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


_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide}
_COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_COMPARISONS |= {"eq": np.equal, "ne": np.not_equal}


def _compute_by_numpy() -> None:
    """Compute the operators of fp32 and int32 operands without conversions and copies.

    NumPy broadcasts operands as Triton does. All other operands are left to the interpreter.
    """
    kinds: Any = {"fp32": (tl.float32, np.float32, float), "int32": (tl.int32, np.int32, int)}
    blocks: dict[Any, Any] = {}
    tensor: Any = tl.tensor

    def result(data: Any, scalar: Any, is_block: bool) -> Any:
        if not is_block:
            return tensor(interpreter.TensorHandle(data, scalar), scalar)
        key = scalar.name, data.shape
        if key not in blocks:
            blocks[key] = tl.block_type(scalar, list(data.shape))
        return tensor(interpreter.TensorHandle(data, scalar), blocks[key])

    def replace(name: str, operation: Any, reverse: bool = False) -> None:
        slow, compares = getattr(tensor, name), operation in _COMPARISONS.values()

        def run(self: Any, other: Any) -> Any:
            other = other.value if isinstance(other, tl.constexpr) else other
            scalar, number, python = kinds.get(self.dtype.name, (None, None, None))
            a, b, is_block = self.handle.data, None, self.type.is_block()
            if type(other) is tensor and other.dtype == scalar:
                is_block, b = is_block or other.type.is_block(), other.handle.data
            elif scalar is not None and type(other) in (int, python):
                b = number(other)
            if b is None or (number is np.int32 and operation is np.divide):
                return slow(self, other, _semantic=interpreter.interpreter_semantic)
            a, b = (b, a) if reverse else (a, b)
            if compares:
                return result(operation(a, b), tl.int1, is_block)
            if number is np.float32:
                return result(operation(a, b), scalar, is_block)
            exact = operation(a, b, dtype=np.int64)
            data = exact.astype(np.int32)
            assert (data == exact).all(), "an integer overflows"
            return result(data, scalar, is_block)

        setattr(tensor, name, run)

    for name, operation in _ARITHMETIC.items():
        replace(f"__{name}__", operation)
        replace(f"__r{name}__", operation, reverse=True)
    for name, operation in _COMPARISONS.items():
        replace(f"__{name}__", operation)


def _call_without_wrappers() -> None:
    """Call the functions of the language directly, not through two wrappers."""
    semantic = interpreter.interpreter_semantic

    def patch(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **names: Any) -> Any:
            names["_semantic"] = semantic
            return function(*arguments, **names)

        scope.set_attr(target, name, call)

    interpreter._patch_attr = patch  # type: ignore[assignment]
    unwrap = tl.core._unwrap_if_constexpr
    tl.core._unwrap_if_constexpr = lambda x: x if type(x) is tl.tensor else unwrap(x)


def _skip_checks_of_handles() -> None:
    """Make handles without checking the size of their elements."""

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    handle: Any = interpreter.TensorHandle
    handle.__init__ = init


def _scan_all_rows_at_once() -> None:
    """Combine whole slices along a scan's axis instead of single elements."""

    def scan(self: Any, inputs: Any) -> Any:
        rows = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        found: list[Any] = []
        for row in zip(*rows, strict=True):
            own = tuple(self.to_tensor(x, of.dtype) for x, of in zip(row, inputs, strict=True))
            found.append(self.combine_fn.fn(*found[-1], *own) if found else own)
        results = []
        for n, (of, like) in enumerate(zip(inputs, rows, strict=True)):
            whole = np.stack([x[n].handle.data for x in found]).reshape(like.shape)
            results.append(self.to_tensor(np.moveaxis(whole, 0, self.axis), of.dtype))
        return results

    operation: Any = interpreter.ScanOps
    operation.generic_scan = scan
