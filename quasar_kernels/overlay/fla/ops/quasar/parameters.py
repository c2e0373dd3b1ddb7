"""Parameters of modules: marks that survive copies, and assignment to sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn as nn


class MarkedParameters(nn.Module):
    """A module that keeps `_no_weight_decay = True` on some of its parameters, for optimizers.

    torch drops attributes of parameters when it copies or replaces them: in `copy.deepcopy`,
    pickles, `to_empty`, `load_state_dict(assign=True)` and `fully_shard`.
    """

    UNDECAYED: ClassVar[tuple[str, ...]] = ()
    """The names of the parameters with the mark."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.UNDECAYED:
            self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MarkedParameters:
        super()._apply(fn, recurse)
        self._mark()
        return self

    def _mark(self) -> None:
        for name in self.UNDECAYED:
            if (parameter := self._parameters.get(name)) is not None:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]


@torch.no_grad()
def set_values(parameter: Any, values: torch.Tensor) -> None:
    """Overwrite a parameter, which FSDP2 may have sharded, by values of its whole shape."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements
        # every rank has computed the same values, so none sends them
        values = distribute_tensor(values.to(parameter.dtype), mesh, placements, src_data_rank=None)
    parameter.copy_(values)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
