"""The mechanisms' implementations on a CPU against float64, and which results are not timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import mechanisms
from benchmarks.engine.comparison import Wrong
from benchmarks.engine.mechanism import OURS, Calls
from benchmarks.engine.mechanism_work import Work, entries, packed_bounds
from benchmarks.mechanisms import implementations
from tests import PROJECT

KNOWN = implementations()
ON_CPU = [name for name in KNOWN if KNOWN[name].by in (OURS, "torch") and name != "block"]
TOKENS = 150


def make(name: str) -> Calls:
    return KNOWN[name].make("cpu")


def test_a_file_adds_a_mechanism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (PROJECT / "benchmarks/mechanisms/gla.py").read_text()
    (tmp_path / "another.py").write_text(code.replace('"gla": Impl', '"another": Impl'))
    folders = [*mechanisms.__path__, str(tmp_path)]
    monkeypatch.setattr(mechanisms, "__path__", folders)
    assert set(implementations()) == {*KNOWN, "another"}


@pytest.mark.parametrize("name", ON_CPU)
def test_implementations_agree_with_float64_on_a_cpu(name: str) -> None:
    work = Work(name, make(name), TOKENS, "cpu")
    assert work.checked("forward", TOKENS).errors["o"] < 5e-3
    found = work.checked("forward and backward", TOKENS)
    assert set(found.errors) == set(work.x)
    assert max(found.errors.values()) < 1e-2
    assert found.repeats
    if name != "softmax":  # it needs a GPU for packed sequences
        bounds = packed_bounds(TOKENS, "cpu")
        assert bounds.host.numel() > 2
        assert max(work.checked("forward and backward", TOKENS, bounds).errors.values()) < 1e-2
    row = work.decoded(batch=2)
    assert row["errors"]["o"] < 5e-3
    assert row["figures"]["ms"] > 0


def test_the_block_agrees_with_itself_in_float64() -> None:
    work = Work("block", make("block"), 12, "cpu")
    assert work.checked("forward", 12).errors["o"] < 1e-2
    assert set(work.checked("forward and backward", 12).errors) == {"x"}
    row = work.measured("forward", 12)
    products = sum(p.numel() for p in work.calls.parameters if p.ndim > 1)
    assert row["figures"]["operations"] == pytest.approx(12 * 2 * products)


def test_a_wrong_result_is_not_timed() -> None:
    made = make("delta")
    flipped = made._replace(
        chunks=lambda x, bounds: made.chunks({**x, "k": x["k"].flip(1)}, bounds)
    )
    with pytest.raises(Wrong, match="relative RMS error of o is"):
        Work("delta", flipped, 40, "cpu").measured("forward", 40)
    broken = made._replace(chunks=lambda x, bounds: made.chunks(x, bounds) / 0)
    with pytest.raises(Wrong, match="o is not finite"):
        Work("delta", broken, 40, "cpu").measured("forward", 40)


@pytest.mark.nightly
def test_failed_and_too_long_calls_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("delta", make("delta"), 80, "cpu")

    def fails(*_: Any) -> Any:
        raise RuntimeError("no kernel\nand much more")

    work.calls = work.calls._replace(chunks=fails)
    timed = {"figures": {"ms": 600.0}}
    monkeypatch.setattr(work, "decoded", lambda: timed)
    failed = "RuntimeError: no kernel"
    expected = [failed, None, failed, failed, failed]
    assert [entry.failure for entry in entries(work, 1, [20])] == expected
    monkeypatch.setattr(work, "measured", lambda way, tokens, bounds=None: timed)
    found = list(entries(work, 1, [20, 80]))
    assert found[1].failure == "it would take about 2.4 s, and 1 s is the limit"
