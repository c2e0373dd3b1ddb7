"""The mechanisms' implementations: ours on a CPU against float64, fla's by its naive functions.

The fakes of fla's functions have their signatures and compute by fla's own naive functions.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fla.ops import delta_rule, gated_delta_rule, gla, kda, rwkv6, rwkv7, simple_gla
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

from benchmarks import mechanisms
from benchmarks.cases import mechanisms as case
from benchmarks.engine import processes
from benchmarks.engine.mechanism import FLA, OURS, SEQUENTIAL, Calls
from benchmarks.engine.mechanism_work import Work, Wrong, entries, packed_bounds
from benchmarks.engine.processes import Lost
from benchmarks.engine.results import Entry
from benchmarks.mechanisms import implementations
from benchmarks.report import mechanisms as page
from tests import PROJECT
from tests.benchmarks.runs import run_of

KNOWN = implementations()
OPERATORS = [name for name in KNOWN if name not in ("block", "model")]
ON_CPU = [name for name in OPERATORS if KNOWN[name].by in (OURS, SEQUENTIAL, "torch")]
OF_FLA = [name for name in OPERATORS if KNOWN[name].by == FLA]
TOKENS = 150


def make(name: str) -> Calls:
    found = KNOWN[name].make
    assert found is not None
    return found("cpu")


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def by_heads(function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Any:
    o, state = function(*heads_first(*tensors), **options)
    return o.transpose(1, 2), state


def naive_kda(x: dict[str, Any], **state: Any) -> Any:
    return naive_recurrent_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], x["scale"], **state)


def naive_gla(x: dict[str, Any], **state: Any) -> Any:
    assert x["scale"] is None
    decays = x["g"] if "g" in x else x["gk"]
    return naive_recurrent_gla(x["q"], x["k"], x["v"], decays, **state)


def naive_rwkv6(x: dict[str, Any], **state: Any) -> Any:
    r, k, v, w = heads_first(x["r"], x["k"], x["v"], x["w"])
    o, final = naive_recurrent_rwkv6(r, k, v, w, x["u"], x["scale"], **state)
    return o.transpose(1, 2), final


def naive_rwkv7(x: dict[str, Any], **state: Any) -> Any:
    assert x.get("lower_bound") is None or bool((x["w"] >= x["lower_bound"]).all())
    r = x["r"].float() * x["scale"] * x["r"].shape[-1] ** 0.5  # it scales by itself
    tensors = (r, x["k"], x["v"], x["a"].float(), x["b"], x["w"])
    return by_heads(dplr_recurrence, *tensors, **state)


def naive_simple_gla(x: dict[str, Any], **state: Any) -> Any:
    return naive_recurrent_simple_gla(x["q"], x["k"], x["v"], x["g"], x["scale"], **state)


def naive_delta(x: dict[str, Any], **state: Any) -> Any:
    assert x["scale"] is None
    return by_heads(delta_rule_recurrence, x["q"], x["k"], x["v"], x["beta"], **state)


def naive_gated_delta(x: dict[str, Any], **state: Any) -> Any:
    tensors = (x["q"], x["k"], x["v"], x["beta"], x["g"], x["scale"])
    return gated_delta_rule.naive_recurrent_gated_delta_rule(*tensors, **state)


NAIVE: dict[str, tuple[Any, tuple[str, ...], Callable[..., Any]]] = {
    "kda": (kda, ("chunk_kda", "fused_recurrent_kda"), naive_kda),
    "gla": (gla, ("chunk_gla", "fused_recurrent_gla"), naive_gla),
    "rwkv6-fla": (rwkv6, ("chunk_rwkv6", "fused_recurrent_rwkv6"), naive_rwkv6),
    "rwkv7": (rwkv7, ("chunk_rwkv7", "fused_recurrent_rwkv7"), naive_rwkv7),
    "mamba2-fla": (
        simple_gla,
        ("chunk_simple_gla", "fused_recurrent_simple_gla"),
        naive_simple_gla,
    ),
    "delta-fla": (delta_rule, ("chunk_delta_rule", "fused_recurrent_delta_rule"), naive_delta),
    "gated-delta-fla": (
        gated_delta_rule,
        ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        naive_gated_delta,
    ),
}


def faked(function: Any, naive: Callable[..., Any]) -> Callable[..., Any]:
    """Take what a function's signature takes, and compute it naively, a sequence at a time."""
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        x = dict(bound.arguments)
        assert not x.get("kwargs"), "an argument that the function does not name"
        initial, bounds = x.pop("initial_state"), x.pop("cu_seqlens")
        assert initial is None or initial.dtype == torch.float32
        if x.pop("cu_seqlens_cpu", None) is not None:
            assert bounds.dtype == torch.int64
        if bounds is None:
            return naive(x, initial_state=initial, output_final_state=True)
        cut = [
            naive(
                {
                    name: t[:, first:last] if isinstance(t, torch.Tensor) and t.ndim > 2 else t
                    for name, t in x.items()
                },
                initial_state=None,
                output_final_state=True,
            )
            for first, last in pairwise(bounds.tolist())
        ]
        return torch.cat([o for o, _ in cut], 1), torch.cat([state for _, state in cut])

    return call


def test_every_function_of_fla_has_its_naive_one() -> None:
    assert set(NAIVE) == set(OF_FLA)


def test_a_file_adds_a_mechanism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (PROJECT / "benchmarks/mechanisms/gla.py").read_text()
    (tmp_path / "another.py").write_text(code.replace('"gla": Impl', '"another": Impl'))
    folders = [*mechanisms.__path__, str(tmp_path)]
    monkeypatch.setattr(mechanisms, "__path__", folders)
    assert set(implementations()) == {*KNOWN, "another"}


def test_a_mechanism_without_a_family_has_a_panel() -> None:
    found = page.families({"Quasar", "new one"})
    assert found == {**page.FAMILIES, page.OTHERS: {"new one": page.COLOUR}}


@pytest.mark.parametrize("name", ON_CPU)
def test_what_runs_on_a_cpu_agrees_with_float64(name: str) -> None:
    work = Work(name, make(name), TOKENS, "cpu")
    assert work.errors("forward", TOKENS)["o"] < 5e-3
    found = work.errors("forward and backward", TOKENS)
    assert set(found) == set(work.x)
    assert max(found.values()) < 1e-2
    if name != "softmax" and not work.calls.packs:  # softmax needs a GPU for packed sequences
        bounds = packed_bounds(TOKENS, "cpu")
        assert bounds.host.numel() > 2
        assert max(work.errors("forward and backward", TOKENS, bounds).values()) < 1e-2
    row = work.decoded(batch=2)
    assert row.errors["o"] < 5e-3
    assert row.figures["ms"] > 0


def test_the_block_agrees_with_itself_in_float64() -> None:
    work = Work("block", make("block"), 12, "cpu")
    assert work.errors("forward", 12)["o"] < 1e-2
    assert set(work.errors("forward and backward", 12)) == {"x"}
    row = work.entry("forward", 12)
    products = sum(p.numel() for p in work.calls.parameters if p.ndim > 1)
    assert row.figures["operations"] == pytest.approx(12 * 2 * products)


@pytest.mark.parametrize("name", OF_FLA)
def test_fla_is_called_as_its_signatures_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, functions, naive = NAIVE[name]
    for function in functions:
        monkeypatch.setattr(module, function, faked(getattr(module, function), naive))
    work = Work(name, make(name), TOKENS, "cpu")
    assert work.errors("forward", TOKENS)["o"] < 1e-2
    assert work.errors("forward", TOKENS, packed_bounds(TOKENS, "cpu"))["o"] < 1e-2
    assert work.decoded(batch=2).errors["o"] < 1e-2


def test_a_wrong_result_is_not_timed() -> None:
    made = make("delta")
    flipped = made._replace(
        chunks=lambda x, bounds: made.chunks({**x, "k": x["k"].flip(1)}, bounds)
    )
    with pytest.raises(Wrong, match="relative RMS error of o is"):
        Work("delta", flipped, 40, "cpu").entry("forward", 40)
    broken = made._replace(chunks=lambda x, bounds: made.chunks(x, bounds) / 0)
    with pytest.raises(Wrong, match="o is not finite"):
        Work("delta", broken, 40, "cpu").entry("forward", 40)


def test_what_is_not_reached_and_what_fails_is_named() -> None:
    work = Work("delta", make("delta"), 40, "cpu")
    found = list(entries(work, 1, [20, 40], lambda: 0))
    assert len({str(entry.of) for entry in found}) == len(found) == 7
    assert {entry.failure for entry in found} == {"not reached within the limit"}

    def fails(*_: Any) -> Any:
        raise RuntimeError("no kernel\nand much more")

    work.calls = work.calls._replace(chunks=fails, packs="it does not")
    found = list(entries(work, 1, [20], lambda: 1))
    assert [entry.failure for entry in found] == [
        "RuntimeError: no kernel",
        None,
        "RuntimeError: no kernel",
        *["it does not"] * 2,
    ]


def test_a_call_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("delta", make("delta"), 80, "cpu")
    of = {"way": "forward", "tokens": 20}
    timed = Entry(table="calls", of=of, by="delta", figures={"ms": 600.0})
    monkeypatch.setattr(work, "entry", lambda way, tokens, bounds=None: timed)
    found = list(entries(work, 1, [20, 80], lambda: 1))
    assert found[1].failure == "it would take about 2.4 s, and 1 s is the limit"


def test_the_command_measures_in_fresh_processes_and_names_what_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stream(function: Any, name: str, *_: Any, **__: Any) -> Any:
        of = {"way": "forward", "batch": 1, "tokens": 256, "packed": False}
        yield Entry(table="calls", of=of, by=name, figures={"ms": 1.0})
        if name == "kda":
            raise Lost("exit status 139")

    machine = run_of("mechanisms")
    monkeypatch.setattr(processes, "call", lambda *_: machine)
    monkeypatch.setattr(processes, "stream", stream)
    args = Namespace(device="cpu", commit=None, limit=100.0, tokens=[256], only=["quasar", "kda"])
    *_, run = case.measure(args)
    found = [(entry.by, entry.failure) for entry in run.entries]
    assert sorted(found, key=str) == [("kda", "exit status 139"), ("kda", None), ("quasar", None)]
    assert run.settings["limit_seconds"] == 100
