"""The interface of the subject, in the same process or behind a channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


class Subject(Protocol):
    """The code under test: `serve.InProcessSubject`, or `referee.SubjectProxy` through a socket."""

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Store new values, in the same memory if the shape is unchanged."""

    def draw(self, name: str, shape: Sequence[int], seed: int) -> None:
        """Store the result of `drawn`, as `put` stores tensors."""

    def fetch(self, names: tuple[str, ...], rows: Tensor | None = None) -> dict[str, Tensor]:
        """Return the stored tensors, or these rows of their token dimension."""

    def operate(self, *, initial: bool = False, final: bool = False) -> dict[str, Tensor]:
        """Call the operator; return `o` `[1, T, H, S]` and, if `final`, `state` `[1, H, S, S]`."""

    def build(self) -> dict[str, Tensor]:
        """Make a new layer and return its weights."""

    def weights(self) -> dict[str, Tensor]:
        """Return the layer's weights."""

    def forward(self) -> dict[str, Tensor]:
        """Call the layer on x; return `y`."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of sum(layer(x) * toward) by each weight and by x (`input`)."""

    def tampered(self) -> list[str]:
        """Return the names of guarded functions that were replaced."""
