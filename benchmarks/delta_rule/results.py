"""What a run of speed.py says, as schema-checked models, and the limits it must keep.

An implementation is named `cuda` or `triton` (this project's), `host` (flash-linear-attention's own
function) or as in libraries.py; what a run leaves out has no entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from pydantic import Field

from benchmarks.engine.limits import Criterion
from benchmarks.operator.results import COPY_SHARE, Timing
from benchmarks.operator.training_results import GRADIENT_ERROR, Shape
from benchmarks.results import Frozen, Positive, Run

Rule = Literal["delta rule", "gated delta rule"]
Way = Literal["forward", "forward and backward"]

OURS = ("triton", "cuda")

LONG, MIDDLE = Shape(1, 1_000_000, 8, 64), Shape(1, 16_384, 8, 64)
BATCHED, WIDE = Shape(32, 2048, 8, 64), Shape(1, 65_536, 8, 128)
WIDE_BATCHED = Shape(32, 8192, 32, 128)

SHAPES: dict[Way, tuple[Shape, ...]] = {
    "forward": (MIDDLE, LONG, BATCHED, WIDE, WIDE_BATCHED),
    "forward and backward": (MIDDLE, LONG, BATCHED, WIDE, WIDE_BATCHED),
}
RULES: tuple[Rule, ...] = get_args(Rule)
ROWS = [(rule, way, shape) for way, shapes in SHAPES.items() for shape in shapes for rule in RULES]
"""The calls in the order in which a run measures them."""

LEADS: dict[tuple[Rule, Way, Shape], float] = {
    ("delta rule", "forward", LONG): 15,
    ("delta rule", "forward and backward", LONG): 5,
    ("delta rule", "forward", MIDDLE): 3,
    ("delta rule", "forward and backward", MIDDLE): 3,
    ("delta rule", "forward", BATCHED): 1,
    ("delta rule", "forward and backward", BATCHED): 1,
    ("gated delta rule", "forward", LONG): 8,
    ("gated delta rule", "forward and backward", LONG): 5,
    ("gated delta rule", "forward and backward", MIDDLE): 3,
    ("gated delta rule", "forward and backward", BATCHED): 1,
}
"""How many times faster than the host CUDA must be: graph replay, and from rest where both were."""

BEST_SHARES: dict[tuple[Rule, Way, Shape], float] = {
    ("gated delta rule", "forward", WIDE_BATCHED): 1 / 1.5,
    ("gated delta rule", "forward and backward", WIDE): 1 / 1.5,
}
"""Least speed of CUDA as a share of the fastest other library's, graph replay."""

MOST_MS: dict[tuple[Rule, Shape], float] = {
    ("delta rule", LONG): 1.3,
    ("gated delta rule", WIDE): 0.45,
}
"""Longest accepted time of CUDA's forward pass from rest, as a validator times a layer."""

ERROR = 6e-3
"""Largest accepted relative RMS error of an output, as for QuasarAttention."""


class Row(Frozen):
    """One call's times by implementation, and how far its results are from float64."""

    rule: Rule
    way: Way
    shape: Shape
    times: dict[str, Timing]
    errors: dict[str, dict[str, Positive]] = Field(
        description="relative RMS by implementation and tensor: of the output, or of gradients"
    )
    repeats: dict[str, bool] = Field(description="whether a second call gave the same bits")
    failures: dict[str, str] = Field({}, description="why an implementation was not timed")


class Decoding(Frozen):
    """One token of `batch` sequences, 8 heads, the state kept in fp32."""

    rule: Rule
    batch: int
    width: int
    state_bytes: int = Field(description="read once and written once")
    times: dict[str, Timing]
    copy_ms: Positive = Field(description="copying such states, graph replay, in the same turn")


class DeltaRuleResults(Run):
    """A whole run on one GPU."""

    protocol: str
    host: str = Field(description="the host library's package and version")
    libraries: dict[str, str] = Field({}, description="versions of the others, by name")
    missing: dict[str, str] = Field({}, description="why a library was not measured at all")
    rows: tuple[Row, ...]
    decoding: tuple[Decoding, ...]


def joined(parts: Sequence[DeltaRuleResults]) -> DeltaRuleResults:
    """Return the parts of one run, each measured on a GPU of its own of one machine, as one.

    Raises:
        ValueError: they are of different commits, GPUs or libraries.
    """
    first = parts[0]
    for part in parts[1:]:
        for name in ("commit", "protocol", "host", "libraries", "missing"):
            if getattr(part, name) != getattr(first, name):
                raise ValueError(f"parts of different runs: {name} differs")
        if (part.environment.gpu, part.environment.driver) != (
            first.environment.gpu,
            first.environment.driver,
        ):
            raise ValueError("parts of different runs: the GPU differs")
    rows = {(row.rule, row.way, row.shape): row for part in parts for row in part.rows}
    return first.model_copy(
        update={
            "protocol": f"{first.protocol} The calls are spread over {len(parts)} GPUs of one "
            "machine, each with all of its implementations on one of them.",
            "rows": tuple(rows[call] for call in ROWS if call in rows),
            "decoding": tuple(token for part in parts for token in part.decoding),
        }
    )


def call_name(rule: Rule, way: Way, shape: Shape) -> str:
    """Return what a table calls a call."""
    return f"{rule}, {way}, {' x '.join(f'{n:,}' for n in shape)}"


def lead(row: Row | Decoding, name: str = "cuda", kind: str = "graph_ms") -> float | None:
    """Return how many times faster than the host an implementation is, where both were timed."""
    ours, host = (getattr(row.times.get(n), kind, None) for n in (name, "host"))
    return None if ours is None or host is None else host / ours


def share_of_best(row: Row) -> float | None:
    """Return CUDA's speed as a share of the fastest other library's, where there is one."""
    others = [time.graph_ms for name, time in row.times.items() if name not in OURS]
    if "cuda" not in row.times or not others:
        return None
    return min(others) / row.times["cuda"].graph_ms


def delta_rule_criteria(results: DeltaRuleResults) -> Iterator[Criterion]:
    """Yield every limit with its figure."""
    for row in results.rows:
        text = call_name(row.rule, row.way, row.shape)
        least, ahead = LEADS.get((row.rule, row.way, row.shape)), lead(row)
        if least is not None and ahead is not None:
            yield Criterion(f"{text}, times the host", ahead, least, True)
        rested = lead(row, kind="rested_ms")
        if least is not None and rested is not None:
            yield Criterion(f"{text}, times the host, from rest", rested, least, True)
        least, share = BEST_SHARES.get((row.rule, row.way, row.shape)), share_of_best(row)
        if least is not None and share is not None:
            yield Criterion(f"{text}, times the fastest other library", share, least, True)
        most = MOST_MS.get((row.rule, row.shape))
        if row.way == "forward" and most is not None and "cuda" in row.times:
            yield Criterion(f"{text}, ms from rest", row.times["cuda"].rested_ms or 0, most)
        limit = ERROR if row.way == "forward" else GRADIENT_ERROR
        for name in row.failures.keys() & set(OURS):
            yield Criterion(f"{text}, {name}, timed", False, True, True)
        for name in row.errors.keys() & set(OURS):
            for tensor, error in row.errors[name].items():
                yield Criterion(f"{text}, error of {tensor}, {name}", error, limit)
            yield Criterion(f"{text}, {name}, same bits", row.repeats[name], True, True)
    for token in results.decoding:
        text = f"{token.rule}, decoding, B = {token.batch}, heads of {token.width}"
        if (ahead := lead(token, "triton")) is not None:
            yield Criterion(f"{text}, times the host", ahead, 1, True)
        if token.batch == max(one.batch for one in results.decoding):
            share = token.copy_ms / token.times["triton"].graph_ms
            yield Criterion(f"{text}, share of copy bandwidth", share, COPY_SHARE, True)
