"""The largest length that fits in memory; benchmarks compare the formulas with measured peaks."""

from __future__ import annotations

import pytest

from quasar_kernels.memory import KEPT_MIB, LayerSize, largest_length, peak_bytes


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", ["recorded", "no_grad", "training"])
@pytest.mark.parametrize("size", [LayerSize(), LayerSize(2048, 16, 128)])
@pytest.mark.parametrize("keep_mib", [0, KEPT_MIB])
@pytest.mark.parametrize("gib", [0.2, 1, 4, 6, 20, 100])
def test_the_largest_length_fits_and_longer_ones_do_not(gib, keep_mib, size, way, fused):
    def fits(tokens: int) -> bool:
        return peak_bytes(tokens, way, size, fused=fused, keep_mib=keep_mib) <= gib * 2**30

    longest = largest_length(gib * 2**30, way, size, fused=fused, keep_mib=keep_mib)
    assert longest == 0 or fits(longest)
    assert not any(fits(n) for n in (longest + 1, 2 * longest + 1, 10 * longest + 10_000))
