"""Check and time variants of the chunk kernels on this GPU, in one run.

    python -m benchmarks.operator.tune --lengths 2048,16384,100000,1000000 --json tuning.json

Each variant (tiles, segments) is first compared with the float64 chunk form on layer-like inputs
and on keys that share one direction; only what passes is timed. Times are medians of CUDA-graph
replays, in milliseconds, of the whole operator, alpha included.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.clocks import graph_ms, soak
from benchmarks.operator.inputs import WIDTH, correlated, layer_like
from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, relative_rms

LIMITS = {"layer": 6e-3, "correlated": 9e-3}
"""Largest accepted relative RMS error in bf16, by kind of input."""

CHECK_TOKENS = 4000


def variants(base: Any) -> Iterator[Any]:
    """The tiles to try: chunk length, warps and stages of both passes."""
    yield base
    for c, map_warps, out_warps, stages in itertools.product(
        (16, 32), (1, 2, 4), (1, 2, 4), (1, 2, 3)
    ):
        tiles = base._replace(
            chunk=c, map_warps=map_warps, output_warps=out_warps, output_stages=stages
        )
        if tiles != base and map_warps >= out_warps:
            yield tiles


def check(
    chunk: Any, inputs: Sequence[torch.Tensor], oracle: torch.Tensor, tiles: Any, segments: int
) -> float:
    """Relative RMS error of one variant, its outputs poisoned beforehand."""
    poison = torch.full_like(inputs[0], float("nan"))
    del poison
    plan = chunk.plan_segments(inputs[0], None, tiles, segments)
    out = chunk.chunk_quasar_fwd(*inputs, plan=plan)[0]
    return relative_rms(out, oracle)


def main() -> None:
    """Run the sweep and print the table last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", default="2048,16384,100000,1000000")
    parser.add_argument("--segments", default="", help="comma list tried besides the default")
    parser.add_argument("--default-only", action="store_true", help="time the shipped tiles only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lengths = [int(n) for n in args.lengths.split(",")]
    segments = [None, *(int(n) for n in args.segments.split(",") if n)]

    mount()
    from fla.ops.quasar import chunk
    from fla.ops.quasar.triton_kernels import tuning

    torch.manual_seed(0)
    layer = layer_like(CHECK_TOKENS)
    probes = {"layer": layer, "correlated": correlated(layer, 0.1)}
    oracles = {kind: quasar_chunked(*inputs)[0] for kind, inputs in probes.items()}
    tried = list(
        itertools.islice(
            variants(tuning.tiles_for(WIDTH, torch.bfloat16, torch.device("cuda", 0))),
            1 if args.default_only else None,
        )
    )
    errors = {}
    for tiles in tried:
        errors[tiles] = {
            kind: check(chunk, probes[kind], oracles[kind], tiles, 5) for kind in probes
        }
    passed = [t for t in tried if all(errors[t][k] <= LIMITS[k] for k in LIMITS)]

    rows = []
    soak(2)
    for tokens in lengths:
        inputs = layer_like(tokens)
        for tiles, n in itertools.product(passed, segments):
            if n is not None and n * 2 * tiles.chunk > tokens:
                continue
            plan = chunk.plan_segments(inputs[0], None, tiles, n)
            ms = graph_ms(functools.partial(chunk.chunk_quasar_fwd, *inputs, plan=plan), warm=0.03)
            row = {"tokens": tokens, "ms": round(ms, 4), "segments": n}
            rows.append(row | tiles._asdict() | {f"error_{k}": errors[tiles][k] for k in LIMITS})
        del inputs  # the next length needs the memory
    for tiles in tried:
        if tiles not in passed:
            print(f"rejected {tuple(tiles)} errors {errors[tiles]}")
    if args.json:
        args.json.write_text(
            json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1)
        )
    for tokens in lengths:
        best = sorted((r for r in rows if r["tokens"] == tokens), key=lambda r: r["ms"])
        for r in [
            *best[:12],
            *(
                r
                for r in best[12:]
                if r["segments"] is None
                and tuple(tried[0]) == tuple(r[f] for f in tried[0]._fields)
            ),
        ]:
            shape = " ".join(
                f"{f}={r[f]}" for f in ("chunk", "map_warps", "output_warps", "output_stages")
            )
            print(
                f"T={tokens} {r['ms']:.4f} ms segments={r['segments']} {shape} "
                f"errors {r['error_layer']:.1e} {r['error_correlated']:.1e}"
            )


if __name__ == "__main__":
    main()
