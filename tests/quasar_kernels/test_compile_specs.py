"""Every jitted kernel compiles for the GPUs that operators have, without one at hand."""

from __future__ import annotations

import pytest

from quasar_kernels.blocks.ssd_triton.specs import ssd_specs
from quasar_kernels.blocks.wkv6_triton.specs import wkv6_specs
from quasar_kernels.compile_specs import ARCHITECTURES, compile_spec, compile_specs

SPECS = [*compile_specs(), *wkv6_specs(), *ssd_specs()]
PAIRS = [
    pytest.param(spec, architecture, id=f"{spec.name} sm_{architecture}")
    for architecture in ARCHITECTURES
    for spec in [*compile_specs(architecture), *wkv6_specs(architecture), *ssd_specs(architecture)]
    # benchmarks.resources.compile compiles these for all of them
    if architecture == 90
    or not (spec.name.endswith("gated") or spec.name.startswith(("wkv6", "ssd")))
]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "architecture"), PAIRS)
def test_kernel_compiles(spec, architecture):
    compiled = compile_spec(spec, architecture)
    assert f".target sm_{architecture}" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 99 * 1024  # what the smallest of them has for a program


def test_a_spec_that_does_not_fit_is_refused():
    spec = SPECS[0]
    wrong = type(spec)("wrong", spec.kernel, {**spec.signature, "unknown": "i32"}, spec.constexprs)
    with pytest.raises(ValueError, match="unknown"):
        compile_spec(wrong, 90)
