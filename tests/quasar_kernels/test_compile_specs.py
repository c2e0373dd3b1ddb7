"""Errors of compile specs; `python -m benchmarks.resources.compile --check` compiles all specs."""

from __future__ import annotations

import pytest

from quasar_kernels.compile_specs import compile_spec, compile_specs


def test_a_spec_with_an_unknown_argument():
    spec = compile_specs()[0]
    wrong = type(spec)("wrong", spec.kernel, {**spec.signature, "unknown": "i32"}, spec.constexprs)
    with pytest.raises(ValueError, match="unknown"):
        compile_spec(wrong, 90)
