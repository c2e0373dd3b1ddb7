"""Measure tokens per second of the inference server's decoder beside transformers' own generate.

    scripts/install.sh miner inference
    python -m benchmarks.inference.speed --out benchmarks/h200/inference.json

A Qwen2 of the reference model's real size (0.5B) with random weights, so nothing is downloaded.
`--device cpu --size tiny --new 16` is a trial without a GPU. The file is written after every row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.engine import commands
from benchmarks.engine.commands import say
from benchmarks.engine.limits import missed
from benchmarks.inference.page import SERVER, STATIC, criteria, shown
from benchmarks.inference.results import InferenceRun, Row
from benchmarks.results import origin, write
from neurons.inference_server.model import DTYPES, Decoder
from neurons.inference_server.sample import SMALL

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
after {WARM_UPS} that do not count. generate: transformers' own, with its default cache and with a \
static one, whose step it compiles; server: neurons.inference, its step compiled and replayed as a \
CUDA graph; not compiled: replayed alone; no graphs: neither."""

Call = Callable[[torch.Tensor], Any]


class Way(NamedTuple):
    """A way to decode: returns a call for so many new tokens; and how long it took to compile."""

    name: str
    call: Callable[[int], Call]
    compile_seconds: float | None = None


def generate(model: Any, new: int, **options: Any) -> Call:
    """Return a call of transformers' own greedy decoding."""

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
    """Return a call of the server's decoder."""
    return lambda prompt: decoder.generate(prompt[0].tolist(), new)


def ways(model: Any, device: str) -> Iterator[Way]:
    """Yield every way, each made when it is its turn."""
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


def seconds_of(call: Call, prompt: torch.Tensor, runs: int) -> float:
    """Return the median seconds of a call after the warm-ups."""
    taken = []
    for number in range(runs + WARM_UPS):
        begun = time.perf_counter()
        call(prompt)
        if prompt.device.type == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UPS:
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def main() -> None:
    """Measure, write the file as it grows, show the table, and say what misses its limit."""
    parser = commands.options(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--new", type=int, default=NEW, help=f"tokens of a request ({NEW})")
    args = parser.parse_args()
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    torch.manual_seed(1)
    config = Qwen2Config(**SIZES[args.size])
    loader: Any = AutoModelForCausalLM  # some versions of transformers type it, others not
    model = loader.from_config(config, dtype=DTYPES[dtype]).to(args.device).eval()
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT), device=args.device)
    run = InferenceRun(
        **origin(args.commit, args.device),
        protocol=PROTOCOL,
        size=args.size,
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=dtype,
        transformers=metadata.version("transformers"),
        prompt=PROMPT,
        new=args.new,
        rows=(),
    )
    for way in ways(model, args.device):
        whole, first = (seconds_of(way.call(new), prompt, RUNS) for new in (args.new, 1))
        row = Row(way=way.name, tokens_per_sec=args.new / whole, first_token_ms=first * 1e3)
        say(f"{row.way}: {row.tokens_per_sec:.1f} tokens/s, first {row.first_token_ms:.1f} ms")
        known = run.compile_seconds if way.compile_seconds is None else way.compile_seconds
        run = run.model_copy(update={"rows": (*run.rows, row), "compile_seconds": known})
        write(args.out, run)
    print(shown(run))
    for miss in missed(criteria(run)):
        print(f"misses its limit: {miss}")


if __name__ == "__main__":
    main()
