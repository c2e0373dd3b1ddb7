"""Other libraries' gated delta rule: that each is called as its own signature says."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benchmarks.cases import delta_rule_libraries
from benchmarks.cases.delta_rule import (
    GATED,
    MIDDLE,
    WIDE,
    draw,
    exact,
    selected,
    takes,
)
from benchmarks.cases.delta_rule_libraries import LIBRARIES, versions
from benchmarks.engine.comparison import WAYS, Shape, wide
from quasar_kernels.delta_reference import delta_chunked
from quasar_kernels.reference import relative_rms


def like_flashqla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute what flash_qla 0.1.3 documents, for the arguments that it takes."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert q.shape[-1] == v.shape[-1] == 128
    assert scale is None
    assert initial_state is None
    assert cu_seqlens is None
    o, _ = delta_chunked(q, k, v, beta, g, scale=128**-0.5, chunk=32)
    return o.to(v.dtype), None


def like_flashinfer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Compute what flashinfer 0.7.2 documents: packed rows, decays that are no logarithms."""
    assert q.ndim == 3
    assert q.shape[-1] == 128
    assert q.dtype == torch.bfloat16
    assert g is not None
    assert beta is not None
    assert cu_seqlens is not None
    assert g.dtype == beta.dtype == torch.float32
    assert all(t.is_contiguous() for t in (q, k, v, g, beta))
    assert max_seqlen == cu_seqlens.diff().max()
    ends = cu_seqlens.tolist()
    assert ends[-1] == len(q)
    parts = []
    for a, b in pairwise(ends):
        row = [t[None, a:b] for t in (q, k, v, beta, g.log())]
        parts.append(delta_chunked(*row, scale=128**-0.5, chunk=32)[0])
    return torch.cat(parts, dim=1)[0].to(v.dtype)


@pytest.fixture
def installed(monkeypatch):
    """Fakes of both libraries, as Python would import them."""
    for name, function in (
        ("flash_qla", like_flashqla),
        ("flashinfer", None),
        ("flashinfer.gdn_prefill", like_flashinfer),
    ):
        module = ModuleType(name)
        if function is not None:
            module.chunk_gated_delta_rule = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(metadata, "version", {"flash-qla": "1", "flashinfer-python": "2"}.get)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_called_by_its_own_signature_computes_the_gated_delta_rule(name, installed):
    torch.manual_seed(0)
    x = draw(GATED, Shape(3, 70, 2, 128), "cpu")
    with selected(GATED, name) as function:
        assert relative_rms(function(x), exact(wide(x))) <= 6e-3


def test_a_library_is_asked_for_what_it_has_alone():
    asked = [(name, way) for name in LIBRARIES for way in WAYS if takes(name, GATED, way, WIDE)]
    assert asked == [
        ("flashqla", "forward"),
        ("flashqla", "forward and backward"),
        ("flashinfer", "forward"),
    ]
    for name in LIBRARIES:
        assert not takes(name, "delta rule", "forward", WIDE)
        assert not takes(name, GATED, "forward", MIDDLE)


def test_a_library_is_named_with_its_version_or_with_why_it_cannot_be_called(
    installed, monkeypatch
):
    def refuse(name: str) -> ModuleType:
        if name == "flash_qla":
            raise ValueError("supports sm90 only")
        return sys.modules[name]

    monkeypatch.setattr(delta_rule_libraries, "import_module", refuse)
    wanted = ({"flashinfer": "2"}, {"flashqla": "ValueError: supports sm90 only"})
    assert versions() == wanted


def test_fla_is_not_timed_as_flashqla():
    from fla.ops.gated_delta_rule.backends import FlashQLABackend

    backend = FlashQLABackend()
    assert backend.is_enabled(), "or the switch has nothing to switch off"
    with selected(GATED, "fla"):
        assert not backend.is_enabled()
    assert os.environ.get("FLA_FLASH_QLA") is None
