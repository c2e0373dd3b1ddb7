"""The implementations: how each is called for whole sequences, packed ones and one token.

A module is imported when its implementation is made, so that one that is missing fails alone. The
host library's functions take the arguments that its own layers give them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.mechanisms.inputs import (
    MECHANISMS,
    RWKV7_BOUND,
    STATE,
    Exact,
    Inputs,
    recurrence,
)
from benchmarks.mechanisms.names import ENTRIES
from benchmarks.operator.training_results import Shape
from quasar_kernels.reference import quasar_recurrence

HEADS, WIDTH = 8, 64
CACHE_TOKENS = 4096
"""Keys and values that softmax attention decodes behind."""
PACKED_TOKENS = 65_536
PACKED_LENGTHS = (131, 369, 524, 1021, 1027, 2047, 3017, 4095, 5121, 8193, 9999, 13_609)
"""Of packed sequences; the last takes what is left. Three lie within the checked tokens."""


class Bounds(NamedTuple):
    """Where sequences packed in one row begin and end, `[N + 1]` int64."""

    here: Tensor  # on the tensors' device
    host: Tensor


def packed_bounds(tokens: int, device: str) -> Bounds:
    """Return bounds of sequences of mixed lengths that fill a row."""
    edges = [0]
    for length in PACKED_LENGTHS:
        if edges[-1] + length < tokens:
            edges.append(edges[-1] + length)
    host = torch.tensor([*edges, tokens])
    return Bounds(host.to(device), host)


Chunks = Callable[[Inputs, Bounds | None], Tensor]
Step = Callable[[Inputs, Any], Tensor]


class Implementation(NamedTuple):
    """How a mechanism is called."""

    draw: Callable[[int, int], Inputs]  # of sequences and tokens
    exact: Exact
    chunks: Chunks  # o of whole sequences
    step: Step  # o of one token behind states, which it may overwrite
    state: Callable[[int], Any]  # draws states of sequences: a tensor, or layers.States
    operations: Callable[[list[int]], float] = lambda lengths: 0.0
    """Of products that nothing saves in a forward pass over sequences of these lengths."""
    packs: str = ""  # why it takes no packed sequences, where it does not
    parameters: tuple[Tensor, ...] = ()  # that have gradients beside the inputs
    like: str = "v"  # the input whose shape and dtype the output has
    changes_state: bool = True  # whether a step reads the state and writes it
    backward_operations: float = 2  # of the backward pass over the forward pass's


def make(name: str, device: str) -> Implementation:
    """Return an implementation of names.py.

    Raises:
        ImportError: what computes it is not installed, or another error of its import.
    """
    if name == "block":
        from benchmarks.mechanisms.layers import hybrid_block

        return hybrid_block(device)
    mechanism = MECHANISMS[ENTRIES[name].mechanism]
    made = MAKERS[name](device)

    def draw(batch: int, tokens: int) -> Inputs:
        return mechanism.draw(Shape(batch, tokens, HEADS, WIDTH), device)

    def state(batch: int) -> Tensor:
        return torch.randn(batch, HEADS, WIDTH, WIDTH, device=device)

    shared = {"draw": draw, "exact": mechanism.exact, "state": state}
    return Implementation(**{**shared, **made})


def _found(module: str, *names: str) -> list[Any]:
    """Import functions; theirs are decorated, and have no types to rely on."""
    return [getattr(import_module(module), name) for name in names]


def _quasar(device: str) -> Mapping[str, Any]:
    chunk_quasar, fused_recurrent_quasar = _found(
        "fla.ops.quasar", "chunk_quasar", "fused_recurrent_quasar"
    )

    def chunks(x: Inputs, bounds: Bounds | None) -> Tensor:
        o: Tensor = chunk_quasar(**x, cu_seqlens=bounds and bounds.host)[0]
        return o

    def step(x: Inputs, state: Tensor) -> Tensor:
        o: Tensor = fused_recurrent_quasar(**x, initial_state=state, inplace_state=True)[0]
        return o

    return {"chunks": chunks, "step": step}


def _delta(rule: str, ours: bool, device: str) -> Mapping[str, Any]:
    module = "quasar_kernels.delta_rule" if ours else f"fla.ops.{rule}"
    chunk, recurrent = _found(module, f"chunk_{rule}", f"fused_recurrent_{rule}")
    keep = {"inplace_state": True} if ours else {"output_final_state": True}

    def chunks(x: Inputs, bounds: Bounds | None) -> Tensor:
        o: Tensor = chunk(**x, **_packed(bounds))[0]
        return o

    def step(x: Inputs, state: Tensor) -> Tensor:
        o: Tensor = recurrent(**x, initial_state=state, **keep)[0]
        return o

    return {"chunks": chunks, "step": step}


def _packed(bounds: Bounds | None) -> dict[str, Tensor]:
    """Return the arguments by which the host library's chunk functions take bounds."""
    return {} if bounds is None else {"cu_seqlens": bounds.here, "cu_seqlens_cpu": bounds.host}


def _rwkv6(device: str) -> Mapping[str, Any]:
    from quasar_kernels.blocks.wkv6 import wkv6

    return {
        "chunks": lambda x, bounds: wkv6(**x, cu_seqlens=bounds and bounds.host)[0],
        "step": lambda x, state: wkv6(**x, initial_state=state)[0],
    }


def _rwkv6_of_host(device: str) -> Mapping[str, Any]:
    chunk_rwkv6, fused_recurrent_rwkv6 = _found(
        "fla.ops.rwkv6", "chunk_rwkv6", "fused_recurrent_rwkv6"
    )

    return {
        "chunks": lambda x, bounds: chunk_rwkv6(**x, scale=1.0, **_packed(bounds))[0],
        "step": lambda x, state: fused_recurrent_rwkv6(
            **x, scale=1.0, initial_state=state, output_final_state=True
        )[0],
    }


def _kda(device: str) -> Mapping[str, Any]:
    chunk_kda, fused_recurrent_kda = _found("fla.ops.kda", "chunk_kda", "fused_recurrent_kda")

    return {
        "chunks": lambda x, bounds: chunk_kda(**x, **_packed(bounds))[0],
        "step": lambda x, state: fused_recurrent_kda(
            **x, initial_state=state, output_final_state=True
        )[0],
    }


def _gla(device: str) -> Mapping[str, Any]:
    chunk_gla, fused_recurrent_gla = _found("fla.ops.gla", "chunk_gla", "fused_recurrent_gla")

    def step(x: Inputs, state: Tensor) -> Tensor:
        o: Tensor = fused_recurrent_gla(
            x["q"], x["k"], x["v"], gk=x["g"], initial_state=state, output_final_state=True
        )[0]
        return o

    return {"chunks": lambda x, bounds: chunk_gla(**x, **_packed(bounds))[0], "step": step}


def _rwkv7(device: str) -> Mapping[str, Any]:
    chunk_rwkv7, fused_recurrent_rwkv7 = _found(
        "fla.ops.rwkv7", "chunk_rwkv7", "fused_recurrent_rwkv7"
    )

    return {
        "chunks": lambda x, bounds: chunk_rwkv7(
            **x, scale=1.0, lower_bound=RWKV7_BOUND, **_packed(bounds)
        )[0],
        "step": lambda x, state: fused_recurrent_rwkv7(
            **x, scale=1.0, initial_state=state, output_final_state=True
        )[0],
    }


def _mamba2(kernels: str, device: str) -> Mapping[str, Any]:
    from quasar_kernels.blocks.ssd import OPERATOR, ssd

    found: Callable[..., tuple[Tensor, Tensor]]
    found = ssd if device == "cpu" else OPERATOR.named(kernels).call
    arguments = ("x", "dt", "A", "B", "C")

    def call(x: Inputs, state: Tensor | None, bounds: Bounds | None) -> Tensor:
        where = bounds and (bounds.host if kernels == "triton" else bounds.here)
        given: list[Any] = [*(x[n] for n in arguments), None, state, where]
        return found(*given)[0]

    def chunks(x: Inputs, bounds: Bounds | None) -> Tensor:
        return call(x, None, bounds)

    if kernels == "triton":
        return {"chunks": chunks, "step": lambda x, state: call(x, state, None), "like": "x"}
    if kernels == "fla-core":
        (fused_recurrent_simple_gla,) = _found("fla.ops.simple_gla", "fused_recurrent_simple_gla")

        def step(x: Inputs, state: Tensor) -> Tensor:
            q, k = (x[n].expand(-1, -1, HEADS, -1).contiguous() for n in ("C", "B"))
            v, g = (x["x"] * x["dt"][..., None]).to(x["x"].dtype), x["dt"] * x["A"]
            o: Tensor = fused_recurrent_simple_gla(
                q, k, v, g=g, scale=1.0, initial_state=state, output_final_state=True
            )[0]
            return o

        return {"chunks": chunks, "step": step, "like": "x"}
    (selective_state_update,) = _found(
        "mamba_ssm.ops.triton.selective_state_update", "selective_state_update"
    )

    def update(x: Inputs, state: Tensor) -> Tensor:
        # its states have values first, and its rates and step sizes a value a channel
        rates = x["A"][:, None, None].expand(-1, WIDTH, STATE).float()
        sizes = x["dt"][:, 0, :, None].expand(-1, -1, WIDTH)
        first = (x[n][:, 0] for n in ("B", "C"))
        o: Tensor = selective_state_update(state.mT, x["x"][:, 0], sizes, rates, *first)
        return o[:, None]

    why = "quasar_kernels gives mamba_ssm no packed sequences"
    return {"chunks": chunks, "step": update, "packs": why, "like": "x"}


def _sequential(mechanism: str, device: str) -> Mapping[str, Any]:
    """One token after the other in fp32, as the definitions have it."""

    def call(x: Inputs, state: Tensor | None) -> Tensor:
        given = {name: t.float() for name, t in x.items()}
        if mechanism == "Quasar":
            o = quasar_recurrence(**given, initial_state=state, dtype=torch.float32)[0]
        elif mechanism == "RWKV-6":
            r, k, v, w, u = given.values()
            o = recurrence(r, k, v, w, state=state, u=u)[0]
        else:
            C, B = (given[name].expand(-1, -1, HEADS, -1) for name in ("C", "B"))
            decays = (given["dt"] * given["A"])[..., None]
            o = recurrence(C, B, given["dt"][..., None] * given["x"], decays, state=state)[0]
        return o

    why = "one token after the other is timed over one sequence"
    like = "x" if mechanism == "Mamba-2" else "v"
    return {"chunks": lambda x, _: call(x, None), "step": call, "packs": why, "like": like}


def _softmax(device: str) -> Mapping[str, Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o: Tensor = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
            )
        return o.transpose(1, 2)

    def chunks(x: Inputs, bounds: Bounds | None) -> Tensor:
        if bounds is None:
            return attend(x["q"], x["k"], x["v"], True)
        lengths = bounds.host.diff().tolist()
        sizes = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(x[name][0], bounds.here, **sizes)
            for name in ("q", "k", "v")
        )
        return attend(q, k, v, True).values()[None]

    def step(x: Inputs, state: Tensor) -> Tensor:
        return attend(x["q"], state[0], state[1], False)

    def state(batch: int) -> Tensor:
        shape = (2, batch, CACHE_TOKENS, HEADS, WIDTH)
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def operations(lengths: list[int]) -> float:
        return sum(2.0 * n * n * HEADS * WIDTH for n in lengths)

    return {
        "chunks": chunks, "step": step, "state": state, "operations": operations,
        "changes_state": False, "backward_operations": 2.5,
    }  # fmt: skip


MAKERS: Mapping[str, Callable[[str], Mapping[str, Any]]] = {
    "softmax": _softmax,
    "quasar": _quasar,
    "delta": partial(_delta, "delta_rule", True),
    "gated-delta": partial(_delta, "gated_delta_rule", True),
    "delta-fla": partial(_delta, "delta_rule", False),
    "gated-delta-fla": partial(_delta, "gated_delta_rule", False),
    "rwkv6": _rwkv6,
    "rwkv6-fla": _rwkv6_of_host,
    "kda": _kda,
    "gla": _gla,
    "rwkv7": _rwkv7,
    "quasar-torch": partial(_sequential, "Quasar"),
    "rwkv6-torch": partial(_sequential, "RWKV-6"),
    "mamba2-torch": partial(_sequential, "Mamba-2"),
    "mamba2": partial(_mamba2, "triton"),
    "mamba2-ssm": partial(_mamba2, "mamba_ssm"),
    "mamba2-fla": partial(_mamba2, "fla-core"),
}
"""By the names of names.py, for a device; those of layers are made in layers.py."""
