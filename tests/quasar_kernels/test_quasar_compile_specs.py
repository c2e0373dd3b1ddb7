"""Every jitted kernel compiles for the GPUs that operators have, without one at hand."""

from __future__ import annotations

import ast

import pytest

from quasar_kernels.contract import OVERLAY
from quasar_kernels.mount import mount

mount()

from quasar_kernels.compile_specs import (  # noqa: E402
    ARCHITECTURES,
    compile_spec,
    compile_specs,
)

SPECS = compile_specs()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_compiles(spec, architecture):
    compiled = compile_spec(spec, architecture)
    assert f".target sm_{architecture}" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 99 * 1024  # what the smallest of them has for a program


def test_every_launched_kernel_has_a_spec():
    kernels = set()
    for path in (OVERLAY / "fla" / "ops" / "quasar").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                kernels |= {node.name for d in node.decorator_list if "jit" in ast.unparse(d)}
    assert {spec.kernel.__name__ for spec in SPECS} == kernels


def test_a_spec_that_does_not_fit_is_refused():
    spec = SPECS[0]
    wrong = type(spec)("wrong", spec.kernel, {**spec.signature, "unknown": "i32"}, spec.constexprs)
    with pytest.raises(ValueError, match="unknown"):
        compile_spec(wrong, 90)
