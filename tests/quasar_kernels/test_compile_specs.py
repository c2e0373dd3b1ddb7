"""Specs of kernels; that each compiles is checked by `python -m benchmarks.resources.compile`."""

from __future__ import annotations

import pytest

from quasar_kernels.compile_specs import compile_spec, compile_specs


def test_a_spec_that_does_not_fit_is_refused():
    spec = compile_specs()[0]
    wrong = type(spec)("wrong", spec.kernel, {**spec.signature, "unknown": "i32"}, spec.constexprs)
    with pytest.raises(ValueError, match="unknown"):
        compile_spec(wrong, 90)
