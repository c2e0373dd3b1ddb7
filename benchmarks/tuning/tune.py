"""Check and time variants of the chunk kernels on this GPU, in one run.

    python -m benchmarks.tuning.tune --lengths 2048,16384,100000,1000000 --json tuning.json

Each variant (tiles, segments) is first compared with the float64 chunk form on layer-like inputs
and on keys that share one direction; only what passes is timed. Times are medians of CUDA-graph
replays, in milliseconds, of the whole operator, alpha included.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.clocks import graph_ms, poison, soak
from benchmarks.operator.inputs import NOISE, WIDTH, correlated, layer_like
from benchmarks.operator.results import ERRORS
from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, relative_rms

LIMITS = {"layer": ERRORS["layer-like"], "correlated": ERRORS["correlated 10%"]}
"""Largest accepted relative RMS error in bf16, by kind of input."""

CHECK_TOKENS = 4000

LINE = """\
T={tokens} {ms:.4f} ms segments={segments} chunk={chunk} map_warps={map_warps} \
output_warps={output_warps} output_stages={output_stages} \
errors {error_layer:.1e} {error_correlated:.1e}"""


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


def errors_of(scan: Any, tried: Sequence[Any]) -> dict[Any, dict[str, float]]:
    """Relative RMS errors of every variant by kind of input, its outputs poisoned beforehand."""
    layer = layer_like(CHECK_TOKENS)
    errors: dict[Any, dict[str, float]] = {tiles: {} for tiles in tried}
    for kind, inputs in {
        "layer": layer,
        "correlated": correlated(layer, NOISE["correlated 10%"]),
    }.items():
        oracle = quasar_chunked(*inputs)[0]
        for tiles in tried:
            plan = scan.plan_segments(inputs[0], None, tiles, 5)
            poison()
            out = scan.forward(scan.ScanInputs.of(*inputs), plan=plan).o
            errors[tiles][kind] = relative_rms(out, oracle)
    return errors


def timed(
    scan: Any, tokens: int, tried: Mapping[Any, dict[str, float]], segments: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Time each variant, given with its errors, at a length that has room for its segments."""
    call, rows = scan.ScanInputs.of(*layer_like(tokens)), []
    for tiles, n in itertools.product(tried, segments):
        if n is None or n * 2 * tiles.chunk <= tokens:
            plan = scan.plan_segments(call.v, None, tiles, n)
            ms = graph_ms(functools.partial(scan.forward, call, plan=plan), warm=0.03)
            row = {"tokens": tokens, "ms": round(ms, 4), "segments": n, **tiles._asdict()}
            rows.append(row | {f"error_{kind}": error for kind, error in tried[tiles].items()})
    return rows


def best(rows: Sequence[dict[str, Any]], tokens: int, shipped: Any) -> Iterator[str]:
    """Describe the twelve fastest at a length, and the shipped tiles wherever they stand."""
    found = sorted((r for r in rows if r["tokens"] == tokens), key=lambda r: r["ms"])
    for place, row in enumerate(found):
        if place < 12 or (row["segments"] is None and shipped._asdict().items() <= row.items()):
            yield LINE.format(**row)


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
    from fla.ops.quasar.triton_kernels import scan, tuning

    torch.manual_seed(0)
    tiles = tuning.tiles_for(WIDTH, torch.bfloat16, torch.device("cuda", 0))
    tried = list(itertools.islice(variants(tiles), 1 if args.default_only else None))
    errors = errors_of(scan, tried)
    passed = {
        tiles: found
        for tiles, found in errors.items()
        if all(found[kind] <= limit for kind, limit in LIMITS.items())
    }
    soak(2)
    rows = [row for tokens in lengths for row in timed(scan, tokens, passed, segments)]
    for tiles in tried:
        if tiles not in passed:
            print(f"rejected {tuple(tiles)} errors {errors[tiles]}")
    if args.json:
        run = {"gpu": torch.cuda.get_device_name(), "rows": rows}
        args.json.write_text(json.dumps(run, indent=1))
    for tokens in lengths:
        print("\n".join(best(rows, tokens, tried[0])))


if __name__ == "__main__":
    main()
