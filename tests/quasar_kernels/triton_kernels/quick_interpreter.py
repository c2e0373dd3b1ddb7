"""Triton's interpreter without what it repeats; for processes with TRITON_INTERPRET=1.

At every call of one jitted function by another it looks through all of `triton.language` for what
to replace, which the launch has done already, and at every operation it makes a table of all types
anew. Both took 40% of the time of these tests.
"""

from __future__ import annotations

from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    """Take what is repeated out of the interpreter of this process."""
    _patch_once_a_launch()
    _make_numpy_types_once()


def _patch_once_a_launch() -> None:
    """Let a launch replace what the functions of a module see when it first calls one of them."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    seen: set[str] = set()

    def launch_anew(self: Any, *arguments: Any, **names: Any) -> None:
        seen.clear()  # what a launch replaced was put back at its end
        launch(self, *arguments, **names)

    def patch_unseen(fn: Any) -> Any:
        if fn.__module__ in seen:
            return interpreter._LangPatchScope()
        seen.add(fn.__module__)
        return patch(fn)

    interpreter.GridExecutor.__call__ = launch_anew  # type: ignore[method-assign]
    interpreter._patch_lang = patch_unseen


def _make_numpy_types_once() -> None:
    """Keep the NumPy type of each scalar type."""
    real, known = interpreter._get_np_dtype, {}

    def numpy_type(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        if isinstance(scalar, tl.pointer_type):
            return real(scalar)
        if scalar not in known:
            known[scalar] = real(scalar)
        return known[scalar]

    interpreter._get_np_dtype = numpy_type
