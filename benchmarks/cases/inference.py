"""Tokens per second of the inference server's decoder, and of transformers' `generate`.

    scripts/install.sh miner inference
    python -m benchmarks inference --out benchmarks/h200/inference.json

The model is a Qwen2 of the reference model's size (0.5B) with random weights, so nothing is
downloaded. `--device cpu --size tiny --new 16` is a trial without a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.engine.clocks import single_ms
from benchmarks.engine.commands import device_option
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Run, start
from neurons.inference_server.model import DTYPES, Decoder
from neurons.inference_server.sample import SMALL

SERVER, STATIC = "server", "generate, static cache"
PROMPT, NEW, RUNS, WARM_UPS = 128, 256, 3, 2
SIZES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
    "tiny": SMALL,
}

PROTOCOL = f"""\
Random weights, greedy decoding of one sequence by the host's clock, median of {RUNS} requests \
after {WARM_UPS} that do not count. generate: that of transformers, with its default cache and \
with a static one, and a compiled step; server: neurons.inference_server, its step compiled and \
replayed as a CUDA graph; not compiled: only replayed; no graphs: neither."""

Call = Callable[[torch.Tensor], Any]


class Way(NamedTuple):
    """A way to decode: a function that returns a call for N new tokens, and its compile time."""

    name: str
    call: Callable[[int], Call]
    compile_seconds: float | None = None


def generate(model: Any, new: int, **options: Any) -> Call:

    def call(prompt: torch.Tensor) -> Any:
        with torch.inference_mode():
            return model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                **options,
            )

    return call


def decode(decoder: Decoder, new: int) -> Call:
    return lambda prompt: decoder.generate(prompt[0].tolist(), new)


def ways(model: Any, device: str) -> Iterator[Way]:
    """Yield every way; each is created only when the previous one has been timed."""
    yield Way("generate", lambda new: generate(model, new))
    eager = Decoder(model, graphs=False)
    if device == "cpu":
        yield Way(SERVER, lambda new: decode(eager, new))
    else:
        yield Way("server, no graphs", lambda new: decode(eager, new))
        replayed = Decoder(model)
        yield Way("server, not compiled", lambda new: decode(replayed, new))
        begun = time.perf_counter()
        compiled = Decoder(model, compiler="inductor")
        seconds = time.perf_counter() - begun
        yield Way(SERVER, lambda new: decode(compiled, new), seconds)
    yield Way(STATIC, lambda new: generate(model, new, cache_implementation="static"))


def options(parser: argparse.ArgumentParser) -> None:
    device_option(parser)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--new", type=int, default=NEW, help=f"tokens of a request ({NEW})")


def measure(args: argparse.Namespace) -> Iterator[Run]:
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    torch.manual_seed(1)
    config = Qwen2Config(**SIZES[args.size])
    loader: Any = AutoModelForCausalLM  # some versions of transformers type it, others not
    model = loader.from_config(config, dtype=DTYPES[dtype]).to(args.device).eval()
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT), device=args.device)
    versions = {"transformers": metadata.version("transformers")}
    run = start("inference", PROTOCOL, args.commit, device=args.device, versions=versions).adding(
        size=args.size,
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=dtype,
        prompt=PROMPT,
        new=args.new,
    )
    for way in ways(model, args.device):
        whole, first = (
            single_ms(partial(way.call(new), prompt), RUNS, WARM_UPS).wall for new in (args.new, 1)
        )
        figures = {"tokens_per_sec": args.new / whole * 1e3, "first_token_ms": first}
        if way.compile_seconds is not None:
            figures["compile_seconds"] = way.compile_seconds
        run = run.adding(Entry(table="ways", by=way.name, figures=figures))
        yield run


def limits(run: Run) -> Iterator[Criterion]:
    """Yield the limit: no slower than transformers' fastest decoding of one sequence."""
    speeds = {entry.by: entry.figures["tokens_per_sec"] for entry in run.table("ways")}
    if SERVER in speeds and STATIC in speeds:
        what = "tokens/s over generate's with a static cache"
        yield Criterion(what, speeds[SERVER] / speeds[STATIC], 1.0, at_least=True)
