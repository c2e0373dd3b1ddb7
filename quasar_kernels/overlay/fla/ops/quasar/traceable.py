"""Makes a function one operator in the graphs of torch.compile and torch.export.

They can trace neither launches of kernels nor loops that depend on the values of `cu_seqlens`.
While they trace, and in a FakeTensorMode, a call becomes a custom operator with known shapes and
gradients; this file does not change other calls. How much a forward pass saves is known only when
the kernels run. The operator therefore saves its inputs, and the operator of the gradients runs the
forward pass again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fla.ops.quasar import torch_private

Function = TypeVar("Function", bound=Callable[..., Any])

_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
}
"""From annotations to types of a schema; operators have no parameters with other annotations."""
_OVERWRITES = "inplace_state"
"""A parameter that operators lack, because they must not change their inputs."""


def traceable(
    *more: str, dtype_of: str = "q", in_cuda_graphs: bool = True
) -> Callable[[Function], Function]:
    """Return a decorator for functions with tensors and results like those of `chunk_quasar`.

    A call with other arguments than those of the operator breaks the graph.

    Args:
        more: arguments in the function's `**kwargs`, with types and defaults of a schema.
        dtype_of: the argument with the output's dtype.
        in_cuda_graphs: False if the function reads values on the GPU, such as bounds, so that
            mode="reduce-overhead" must not record it. It never records the gradients.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        arguments = [
            f"{kind} {name}" + ("" if x.default is x.empty else f"={x.default}")
            for name, x in parameters.items()
            if (kind := _TYPES.get(str(x.annotation).removeprefix("torch.")))
            and name != _OVERWRITES
        ]
        operator = _Operator(function, (*arguments, *more), dtype_of, in_cuda_graphs)
        names, call = operator.names, operator.call
        positions = [name for name, x in parameters.items() if x.kind == x.POSITIONAL_OR_KEYWORD]
        defaults = {name: x.default for name, x in parameters.items()}
        untraced = torch.compiler.disable(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not (torch.compiler.is_compiling() or torch_private.fake_mode()):
                return function(*args, **kwargs)
            values = {**dict(zip(positions, args, strict=False)), **kwargs}
            others = [name for name in values if name not in names]
            if len(args) > len(positions) or any(
                values[name] is not None and values[name] is not defaults.get(name)
                for name in others
            ):
                return untraced(*args, **kwargs)
            o, final = call(**{name: values[name] for name in values if name in names})
            return o, final if values.get("output_final_state", False) else None

        return run  # type: ignore[return-value]

    return decorate


class _Operator:
    """A function's operator, and that of its gradients."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[str, ...],  # of the schema, with defaults
        dtype_of: str,
        in_cuda_graphs: bool,
    ) -> None:
        self.function, self.dtype_of = function, dtype_of
        required = [x.split("=")[0] for x in arguments]
        self.names = [x.split()[-1] for x in required]
        unsafe = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))  # torch 2.8
        name = f"quasar::{function.__name__}"
        gradients = ", ".join(["Tensor? d_o, Tensor? d_final", *required])
        self.gradients = torch.library.custom_op(
            f"{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"({gradients}) -> Tensor[]",
            tags=unsafe,
        )
        self.gradients.register_fake(_shapes_of_gradients)
        operator = torch.library.custom_op(
            name,
            self._forward,
            mutates_args=(),
            schema=f"({', '.join(arguments)}) -> (Tensor, Tensor)",
            tags=() if in_cuda_graphs else unsafe,
        )
        operator.register_fake(self._shapes)
        operator.register_autograd(self._differentiate, setup_context=_save)
        self.call = operator._opoverload

    def _named(self, inputs: Any) -> dict[str, Any]:
        return dict(zip(self.names, inputs, strict=False))  # torch omits defaults at the end

    def _forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return o and the final state, which is empty if it is not requested."""
        o, final = self.function(**self._named(inputs))
        return _own(o, inputs), o.new_empty(0) if final is None else _own(final, inputs)

    def _shapes(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._named(inputs)
        q, v, bounds = x["q"], x["v"], x.get("cu_seqlens")
        o = v.new_empty(v.shape, dtype=x[self.dtype_of].dtype)
        if not x.get("output_final_state"):
            return o, o.new_empty(0)
        sequences = v.shape[0] if bounds is None else bounds.shape[0] - 1
        widths = (q.shape[3], v.shape[3])
        if x.get("state_v_first"):
            widths = widths[::-1]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return o, v.new_empty(sequences, v.shape[2], *widths, dtype=dtype)

    def _backward(self, *inputs: Any) -> list[torch.Tensor]:
        """Return the gradients of all floating-point inputs."""
        d_results = inputs[:2]
        with torch_private.recorded(), torch.enable_grad():
            copies = [x.detach().requires_grad_() if _is_leaf(x) else x for x in inputs[2:]]
            leaves = [x for x in copies if _is_leaf(x)]
            results = zip(self.function(**self._named(copies)), d_results, strict=True)
            used = [(y, d) for y, d in results if y is not None and d is not None]
            outputs, d_outputs = zip(*used, strict=True)
            found = torch.autograd.grad(outputs, leaves, d_outputs, materialize_grads=True)
        return [_own(x, d_results) for x in found]

    def _differentiate(self, ctx: Any, *d_results: Any) -> tuple[torch.Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if x is None else x[0] for x in ctx.others]
        gradients = iter(self.gradients(*d_results, *inputs))
        return tuple(next(gradients) if _is_leaf(x) else None for x in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # torch passes it
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, torch.Tensor)))
    ctx.others = [None if isinstance(x, torch.Tensor) else (x,) for x in inputs]


def _shapes_of_gradients(*inputs: Any) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in inputs[2:] if _is_leaf(x)]


def _is_leaf(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _own(x: torch.Tensor, inputs: tuple[Any, ...]) -> torch.Tensor:
    """Return a contiguous x that is none of the inputs: torch requires this of an operator."""
    return x.contiguous() if x.numel() and not any(x is y for y in inputs) else x.clone()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
