"""Other libraries' gated delta rule: fla's own kernels are timed as fla's."""

from __future__ import annotations

import os

from benchmarks.cases.delta_rule import GATED, selected


def test_fla_is_not_timed_as_flashqla():
    from fla.ops.gated_delta_rule.backends import FlashQLABackend

    backend = FlashQLABackend()
    assert backend.is_enabled(), "or the switch has nothing to switch off"
    with selected(GATED, "fla"):
        assert not backend.is_enabled()
    assert os.environ.get("FLA_FLASH_QLA") is None
