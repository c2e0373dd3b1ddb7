"""Tokens per second and time to the first token of the inference server, beside transformers' own.

    python scripts/inference_speed.py [--device cuda] [--out FILE]

A Qwen2 of the reference model's real size (0.5B) with random weights, so nothing is downloaded:
plain `generate`, `generate` with a static cache, and the server's decoder as it is, without
compiling, and without CUDA graphs, on the prompt and the length that a validator asks for. --out
keeps the table as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from neurons.inference.model import DTYPES, Decoder

PROMPT, NEW, RUNS = 128, 512, 5
SIZES = {
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
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}


def generate(model: Any, new: int, **options: Any) -> Callable[[torch.Tensor], Any]:
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


def decode(decoder: Decoder, new: int) -> Callable[[torch.Tensor], Any]:
    """Return a call of the server's decoder."""
    return lambda prompt: decoder.generate(prompt[0].tolist(), new)


def seconds_of(call: Callable[[torch.Tensor], Any], prompt: torch.Tensor, runs: int) -> float:
    """Return the median seconds of a call after two that do not count."""
    taken = []
    for number in range(runs + 2):
        begun = time.perf_counter()
        call(prompt)
        if prompt.device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default=None)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    torch.manual_seed(1)
    sizes: dict[str, Any] = {**SIZES[args.size]}
    config = Qwen2Config(**sizes)
    loader: Any = AutoModelForCausalLM  # some versions of transformers type it, others not
    model = loader.from_config(config, dtype=DTYPES[dtype])
    model = model.to(args.device).eval()
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT), device=args.device)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    facts: dict[str, object] = {"size": args.size, "dtype": dtype, "device": where}
    facts["torch"] = torch.__version__
    eager = Decoder(model, graphs=False)
    ways: dict[str, Callable[[int], Callable[[torch.Tensor], Any]]] = {
        "generate": lambda new: generate(model, new),
        "server, no graphs": lambda new: decode(eager, new),
    }
    if args.device == "cuda":
        graphs = Decoder(model)
        ways["server, not compiled"] = lambda new: decode(graphs, new)
        begun = time.perf_counter()
        compiled = Decoder(model, compiler="inductor")
        facts["compiled_in_seconds"] = time.perf_counter() - begun
        ways["server"] = lambda new: decode(compiled, new)
    # last, as transformers compiles it for a minute or more on a GPU
    ways["generate, static cache"] = lambda new: generate(model, new, cache_implementation="static")
    rows: list[dict[str, object]] = []
    for name, way in ways.items():
        whole = seconds_of(way(args.new), prompt, args.runs)
        first = seconds_of(way(1), prompt, args.runs)
        rows.append(
            {"way": name, "tokens_per_sec": args.new / whole, "first_token_ms": first * 1e3}
        )
        speed = f"{args.new / whole:>9.1f} tokens/s  first token {first * 1e3:>8.1f} ms"
        print(f"{name:<24} {speed}", flush=True)
        if args.out:  # after every row: a later one may take long
            found = {**facts, "new": args.new, "rows": rows}
            args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
