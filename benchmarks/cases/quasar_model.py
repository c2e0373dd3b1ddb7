"""A public Quasar model with this project's layer: errors on a CPU, times of a step on a GPU.

    python -m benchmarks quasar_model --model DIR --device cpu --out FILE
    python -m benchmarks quasar_model --model DIR --out benchmarks/h200/quasar-model.json

DIR has the model's code: `archs/quasar` of unarbos/teutonic, or other code with these names. On a
CPU, a small model is compared with the same model in float64 in which the layer's formula replaces
the layer; GLA layers, which need a GPU, are identities in both. On a GPU `ours` is the model with
`AdaptiveQuasarAttention`, and the baseline has fla's modules and delta rule in its place.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.adaptive_layer import Baseline
from benchmarks.engine import clocks, commands, processes, tuning
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Run, start
from quasar_kernels.adaptive_reference import adaptive_layer_reference
from quasar_kernels.mount import mount
from quasar_kernels.reference import relative_rms

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 48,
    "n_layers": 6,
    "n_heads": 3,
    "head_dim": 16,
    "d_ff": 64,
    "num_routed_experts": 8,
    "routed_expert_size": 8,
    "shared_expert_size": 32,
    "memory_slots": 8,
    "memory_dim": 8,
}
CHECKED_TOKENS = 80
FULL: dict[str, Any] = {
    "vocab_size": 248_320,
    "d_model": 1536,
    "n_layers": 6,
    "n_heads": 12,
    "head_dim": 128,
    "d_ff": 4096,
}
LENGTHS = (8192, 16_384)
REPEATS = 5
PARTS = ("quasar", "gla", "dense", "moe", "head")
ERRORS = {"float64": 1e-9, "float32": 1e-4}
"""Largest relative RMS errors of the logits and of each gradient."""
LAYERS = 24
"""Layers of the public model: four times those of the measured one, with the same head."""
GLA_SHARE = 0.1
"""Largest accepted share of GLA layers in the public model's step; beyond it, they should get
kernels in this project."""

PROTOCOL = """\
Errors: a random model of six small layers, two rows of 80 tokens, random gradients of the \
logits. Gradients that are zero but for rounding (below 1e-12 of the largest) are not compared. \
Steps: one group of six layers of the public model's sizes with its embedding and its head, fp32 \
parameters under bf16 autocast, one sequence, forward and backward pass without an optimizer. \
Times are medians of 5: a step's by the host's clock from an idle GPU to an idle GPU, a part's by \
CUDA events. A part's time runs from its begin to its end in both passes, waits for the host \
included; the head's includes the loss. fla's kernels are tuned by 20 ms for each candidate."""


def load_code(folder: Path) -> ModuleType:
    """Import the package in a folder, whatever its name is.

    Raises:
        SystemExit: the folder has no model's code.
    """
    name, init = "quasar_model_code", folder / "__init__.py"
    spec = spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None or not init.exists():
        sys.exit(f"--model {folder} has no __init__.py: name the folder of the model's package")
    code = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(code)
    return code


class Identity(nn.Module):
    """Replaces a GLA layer, which has no code for a CPU."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor]:
        return (x,)


def replace_gla() -> None:
    """Let the model's code import identities as GLA layers, and nothing else of fla."""
    names: dict[str, dict[str, Any]] = {
        "fla.layers.gla": {"GatedLinearAttention": Identity},
        "fla.models": {"__path__": []},
        "fla.models.utils": {"Cache": object, "FLAGenerationMixin": type("Mixin", (), {})},
    }
    for name, values in names.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)


def build(code: ModuleType, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    settings = {"pad_token_id": 0, "use_cache": False}
    return code.QuasarForCausalLM(code.QuasarConfig(**sizes, **settings))


def use_formula(attn: Any) -> None:
    """Let a layer compute its formula with its parameters, token by token."""

    def forward(x: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, None]:
        weights, rotation = dict(attn.named_parameters()), (cos[0, 0], sin[0, 0])
        return adaptive_layer_reference(weights, x, attn.head_dim, attn.norm_eps, rotation), None

    attn.forward = forward


def quasar_blocks(model: Any) -> list[Any]:
    return [block for block in model.model.layers if block.layer_type == "quasar"]


def gradients(model: Any, ids: Tensor, d_logits: Tensor) -> dict[str, Tensor]:
    """Return, by name, the logits and all parameters' gradients that exist."""
    logits = model(input_ids=ids).logits
    logits.backward(d_logits.to(logits.dtype))
    named = ((name, p.grad) for name, p in model.named_parameters())
    return {"logits": logits.detach(), **{name: g for name, g in named if g is not None}}


def compared(folder: Path, commit: str | None) -> Iterator[Any]:
    """Yield a run without entries, and the errors of the model in two precisions."""
    yield start("quasar_model", PROTOCOL, commit, device="cpu")
    mount(adaptive=True)
    replace_gla()
    model = build(load_code(folder), SMALL)
    with torch.no_grad():
        for block in quasar_blocks(model):
            block.attn.dt_bias.normal_()
    ids = torch.randint(SMALL["vocab_size"], (2, CHECKED_TOKENS))
    d_logits = torch.randn(*ids.shape, SMALL["vocab_size"], dtype=torch.float64)
    wide = copy.deepcopy(model).double()
    exact = copy.deepcopy(wide)
    for block in quasar_blocks(exact):
        use_formula(block.attn)
    wanted = gradients(exact, ids, d_logits)
    least = 1e-12 * max(float(g.norm()) for g in wanted.values())
    for name, ours in (("float64", wide), ("float32", model)):
        found = gradients(ours, ids, d_logits)
        if found.keys() != wanted.keys():
            raise AssertionError(f"other gradients: {sorted(found.keys() ^ wanted.keys())}")
        errors = {n: relative_rms(found[n], g) for n, g in wanted.items() if g.norm() > least}
        worst = max((n for n in errors if n != "logits"), key=errors.__getitem__)
        yield Entry(
            table="errors",
            of={"dtype": name},
            by="ours",
            figures={"gradients": len(errors) - 1},
            errors={"logits": errors["logits"], "worst gradient": errors[worst]},
            texts={"worst": worst},
        )


def use_fla(block: Any) -> None:
    """Replace a block's layer by the baseline with the same weights."""
    attn = block.attn
    layer = Baseline(attn.hidden_size, attn.head_dim, attn.num_heads, attn.norm_eps)
    weights = attn.state_dict()
    del weights["f_proj.weight"]  # which no layer uses
    layer.to(attn.A_log.device).load_state_dict(weights)
    block.attn = layer


def step(model: Any, ids: Tensor) -> Tensor:
    """Return the loss of one forward and backward pass."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss: Tensor = model(input_ids=ids, labels=ids).loss
    torch.autograd.backward(loss)
    return loss.detach()


def part_times(model: Any, call: Callable[[], object]) -> dict[str, float]:
    """Return the milliseconds of each part in one call, by events at each begin and end."""
    events: dict[str, list[Any]] = defaultdict(list)  # begin, end, begin, ...

    def mark(part: str) -> Callable[..., None]:
        def record(*_: Any) -> None:
            events[part].append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            events[part][-1].record()

        return record

    norm = model.model.norm  # the head is what follows it, until its gradient arrives
    handles = [
        norm.register_forward_hook(mark("head")),
        norm.register_full_backward_pre_hook(mark("head")),
    ]
    for block in model.model.layers:
        for module, part in (
            (block.attn, block.layer_type),
            (block.ffn, "moe" if block.is_moe else "dense"),
        ):
            handles += [
                module.register_forward_pre_hook(mark(part)),
                module.register_forward_hook(mark(part)),
                module.register_full_backward_pre_hook(mark(part)),
                module.register_full_backward_hook(mark(part)),
            ]
    call()
    torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    return {
        part: sum(a.elapsed_time(b) for a, b in zip(found[::2], found[1::2], strict=True))
        for part, found in events.items()
    }


def timed(folder: Path, commit: str | None) -> Iterator[Any]:
    """Yield a run without entries, and the times of a step with each layer."""
    yield start("quasar_model", PROTOCOL, commit)
    mount(adaptive=True)
    tuning.tune_quickly()
    clocks.soak(1)
    with torch.device("cuda"):
        model = build(load_code(folder), FULL)
    commands.progress("model built")
    buffers = [buffer.clone() for buffer in model.buffers()]
    for by in ("ours", "baseline"):
        if by == "baseline":
            for block in quasar_blocks(model):
                use_fla(block)
        for tokens in LENGTHS:
            clocks.free()
            for buffer, first in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(first)  # a step changes the balance of experts
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(FULL["vocab_size"], (1, tokens), generator=generator).cuda()
            call = partial(step, model, ids)
            loss = call()  # compiles and tunes
            commands.progress(f"{by}, {tokens} tokens: first step done")
            figures = {"loss": float(loss), "peak_bytes": clocks.peak_bytes(call)}
            ms = clocks.single_ms(call, REPEATS, 1).wall
            figures |= {"step_ms": ms, "tokens_per_sec": tokens / ms * 1e3}
            parts = [part_times(model, call) for _ in range(REPEATS)]
            figures |= {f"{part}_ms": median(one[part] for one in parts) for part in PARTS}
            yield Entry(table="steps", of={"tokens": tokens}, by=by, figures=figures)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of the model's package")
    commands.device_option(parser)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    call = args.model.resolve(), args.commit
    # the comparison replaces modules of fla in its process
    results = processes.stream(compared, *call) if args.device == "cpu" else timed(*call)
    run: Run = next(results)
    yield from run.growing(results)


def limits(run: Run) -> Iterator[Criterion]:
    for entry in run.table("errors"):
        for name, error in entry.errors.items():
            what = f"{entry.of['dtype']}, {name}, relative RMS"
            yield Criterion(what, error, ERRORS[str(entry.of["dtype"])])
    for row in run.rows("steps"):
        names = ("step_ms", "gla_ms", "head_ms")
        step_ms, gla_ms, head_ms = (row.figure("ours", name) or 0 for name in names)
        groups = LAYERS // FULL["n_layers"]
        share = groups * gla_ms / (groups * (step_ms - head_ms) + head_ms)
        what = f"GLA layers' share of a step of {LAYERS} layers (computed)"
        what = f"{what}, {row.of['tokens']:,} tokens"
        yield Criterion(what, share, GLA_SHARE)
