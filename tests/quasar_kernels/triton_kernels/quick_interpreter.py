"""A faster interpreter of Triton, for processes with TRITON_INTERPRET=1.

At each call of one jitted function by another, Triton's interpreter searches all of
`triton.language` for functions to replace, though the launch has replaced them. At each operation
it makes a table of all types. Both took 40% of the time of these tests.
"""

from __future__ import annotations

from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    """Remove the repeated work from this process's interpreter."""
    _patch_modules_once()
    _cache_numpy_types()


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
