"""The speed of untrusted code by the referee's own clock; docs/honesty.md has the reasons.

The layer is called in chains: each input depends on the output of the call before. The referee
times a chain, then computes its calls itself: all of them for a fork, some for one's own code.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.worker.chain import (
    LARGEST,
    MAX_CALLS,
    RUN,
    SCALED,
    STEP,
    ChainMaps,
    Link,
    drawn,
    fill_keys,
)
from harness.worker.channel import SubjectProxy
from harness.worker.compare import Checker
from harness.worker.failures import WorkerError
from harness.worker.own_layer import SEGMENT, draw_weights, output_size, outputs, secret_seed
from harness.worker.subject.timing import synchronize
from harness.workload import WORKLOAD

CHAINS, CHAIN_SECONDS = 3, 0.1
"""Number of timed chains, and least seconds of each if the referee can verify so many calls. The
fastest counts, because interference only slows chains down."""

SHORT, CHAINS_OF_SHORT = 16_384, 8
"""Calls of fewer than SHORT tokens wait for the host. They get CHAINS_OF_SHORT chains, because a
slow phase of the host may last longer than CHAINS chains."""

REST = 1.0
"""Seconds for which the GPU rests before the chains of longer calls, as it does while a process of
the public loop starts. Under load, its clock falls by several percent within 0.1 s."""

MIN_CALLS = 4
"""Fewest calls of a chain."""

VERIFIED_TOKENS = {"cuda": 1 << 25, "cpu": 1 << 17}
"""Most tokens of a chain of more than MIN_CALLS calls. The referee verifies every call: an
unverified one could return a false digest at once, so that later calls need not wait for it."""

VERIFIED_OWN = 4
"""Calls that the referee computes for one's own code: its claim does not rest on the chain."""

MAX_LINK_SHARE = 0.2
"""Largest share of a chain's time to subtract, so that slowing `time_link` down gains little."""

RATIO = {"cuda": 1.3, "cpu": 3.0}
"""Largest accepted ratio of the speeds of the loop and a chain, for one's own code."""
RATIO_OF_SHORT = 2.0
"""The same below SHORT tokens on a GPU: between calls, the host launches the link's kernels."""

BUSY, PAIRS = 4.0, 8
"""If a chain takes too long, the host may have become busier since the loop. PAIRS further chains
then alternate with calls without links. If none of these chains is fast enough, the fastest chain
is compared with the fastest calls without links instead of the loop, but with at most BUSY times
the loop's seconds."""


@dataclass(frozen=True)
class Chain:
    """A timed chain: the seed of its keys (`fill_keys`), its digests, its seconds."""

    seed: int
    digests: Tensor  # [calls, channels]
    seconds: float


@dataclass(frozen=True)
class Proof:
    """The best chain and its inputs; the last two figures are the subject's own report."""

    weights: dict[str, Tensor]
    x: tuple[int, int]  # length and seed
    maps: tuple[float, int]  # root mean square of the outputs, and seed
    chain: Chain
    vram_bytes: int
    first_call_seconds: float

    def seconds_per_call(self, link_seconds: float = 0.0) -> float:
        """Return the seconds of a call, without those of the harness's own work after it."""
        whole = self.chain.seconds / len(self.chain.digests)
        return max(whole - link_seconds, (1 - MAX_LINK_SHARE) * whole)


def take(subject: SubjectProxy, length: int, device: torch.device, *, enough: float = 0.0) -> Proof:
    """Request calls of the subject's layer on `length` tokens, and time them.

    A chain that takes at most `enough` seconds per call ends the search for faster ones. Raises a
    WorkerError if the subject failed, ended or did not keep to the protocol.
    """
    weights, seed, maps_seed = draw_weights(device), secret_seed(), secret_seed()
    size = output_size(weights, device)
    prepared, _ = subject.ask(
        "prepare", weights, length=length, seed=seed, size=size, maps_seed=maps_seed
    )
    return Proof(
        weights=weights,
        x=(length, seed),
        maps=(size, maps_seed),
        chain=_best_chain(subject, length, device, enough),
        vram_bytes=int(prepared["vram_bytes"]),
        first_call_seconds=float(prepared["first_call_seconds"]),
    )


def time_link(length: int, device: torch.device) -> float:
    """Return the seconds that the harness's own work takes between two calls of a chain.

    Call this before the subject loads any code, because that code could slow this down.
    """
    try:
        return _time_link(length, device)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the subject needs the memory


def _time_link(length: int, device: torch.device) -> float:
    weights = draw_weights(device)
    on_gpu = device.type == "cuda"
    y = drawn((1, length, WORKLOAD.hidden_size), 0, device).to(
        torch.bfloat16 if on_gpu else torch.float32
    )
    scaled = [weights[name] for name in SCALED]
    link = Link(ChainMaps.draw(length, 1.0, 0, device), scaled, MAX_CALLS)
    # On a GPU a matrix product writes the output, as in a layer: the power limit then lowers the
    # clock as much, and the link reads the output from the cache.
    write = _product(y) if on_gpu else y.neg_
    calls, alone, both = MIN_CALLS, math.inf, math.inf
    for attempt in range(6):
        link.start(0, calls)
        without = _time(calls, device, write)
        seconds = _time(calls, device, write, lambda: link(y))
        if attempt:  # the first attempt captures the graphs
            alone, both = min(alone, without), min(both, seconds)
        calls = max(MIN_CALLS, min(math.ceil(0.02 / seconds), MAX_CALLS))
    return max(0.0, both - alone)


def _product(y: Tensor) -> Callable[[], object]:
    """Return a function that writes a product of two matrices into y `[1, T, channels]`."""
    x, weight = y.clone()[0], drawn((y.shape[2], y.shape[2]), 1, y.device).to(y.dtype)
    return lambda: torch.mm(x, weight, out=y[0])


def _time(calls: int, device: torch.device, *steps: Callable[[], object]) -> float:
    """Return the mean seconds of one call of all steps, over `calls` calls."""
    synchronize(device)
    started = time.monotonic()
    for _ in range(calls):
        for step in steps:
            step()
    synchronize(device)
    return (time.monotonic() - started) / calls


def _best_chain(
    subject: SubjectProxy, length: int, device: torch.device, enough: float = 0.0
) -> Chain:
    """Time chains and return the fastest.

    A chain takes CHAIN_SECONDS, or less if the referee cannot verify so many calls. A short untimed
    chain before each one ends the GPU's idle state.
    """
    # no rest for one's own code (`enough` > 0): its check tolerates a lower clock
    rest = REST if device.type == "cuda" and length >= SHORT and not enough else 0.0
    calls, best = MIN_CALLS, math.inf
    most = max(MIN_CALLS, min(MAX_CALLS, VERIFIED_TOKENS[device.type] // length))
    chains = CHAINS_OF_SHORT if length < SHORT else CHAINS
    while chains:
        time.sleep(rest)
        _run_chain(subject, WORKLOAD.warmup_calls)
        chain = _run_chain(subject, calls)
        per_call = chain.seconds / calls
        if chain.seconds >= CHAIN_SECONDS or calls == most:
            chains -= 1
            if per_call < best:
                best, fastest = per_call, chain
            if per_call <= enough:
                break
        else:
            calls = min(max(calls + 1, math.ceil(1.15 * CHAIN_SECONDS / per_call)), most)
    return fastest


def _run_chain(subject: SubjectProxy, calls: int) -> Chain:
    """Request a chain of calls and measure its time."""
    seed = secret_seed()
    started = time.monotonic()
    _, tensors = subject.ask("chain", seed=seed, calls=calls)
    seconds = time.monotonic() - started
    digests = tensors.get("digests", torch.zeros(0))
    if digests.shape != (calls, WORKLOAD.hidden_size) or digests.dtype != torch.int8:
        raise WorkerError(f"the digests of a chain have the shape {tuple(digests.shape)}", "gate")
    return Chain(seed, digests, seconds)


def cross_check(subject: SubjectProxy, length: int, device: torch.device, per_call: float) -> None:
    """Compare a call's seconds in the loop of one's own code with those in a chain.

    Ends the subject. Raises a WorkerError if the loop was faster by more than RATIO, or
    RATIO_OF_SHORT, and the host is not the reason (BUSY).
    """
    short_on_gpu = device.type == "cuda" and length < SHORT
    ratio = RATIO_OF_SHORT if short_on_gpu else RATIO[device.type]
    enough, alone = ratio * per_call, math.inf
    proof = take(subject, length, device, enough=enough)
    for _ in range(PAIRS):
        if proof.seconds_per_call() <= enough:
            break
        alone = min(alone, _time_alone(subject, len(proof.chain.digests)))
        chain = _run_chain(subject, len(proof.chain.digests))
        if chain.seconds < proof.chain.seconds:
            proof = replace(proof, chain=chain)
    else:  # only after all pairs, because a single slow period must not excuse a slow chain
        enough = ratio * max(per_call, min(alone, BUSY * per_call))
    subject.end()
    verify(proof, device, VERIFIED_OWN, own=True)
    proven = proof.seconds_per_call()
    if proven > enough:
        times = f"{per_call * 1e3:.2f} ms in the loop, {alone * 1e3:.2f} ms alone afterwards"
        raise WorkerError(
            "the timed calls did not compute the layer, or other programs slowed later calls down: "
            f"a call took {times}, and {proven * 1e3:.2f} ms in a chain",
            "gate",
        )


def _time_alone(subject: SubjectProxy, calls: int) -> float:
    """Return the mean seconds of `calls` calls without links.

    Untimed calls come first, as in the loop. The preceding chain has changed the weights, so code
    that reuses its outputs computes the first of these calls, which must not be a timed one.
    """
    subject.ask("repeat", calls=WORKLOAD.warmup_calls)
    started = time.monotonic()
    subject.ask("repeat", calls=calls)
    return (time.monotonic() - started) / calls


def verify(proof: Proof, device: torch.device, most: int = MAX_CALLS, *, own: bool = False) -> None:
    """Compute the calls of the chain, or `most` of them, and compare their digests.

    Call this after the subject has ended, because it needs the subject's memory. Of a long chain,
    the last call and random others are computed. Raises a WorkerError for a digest that is not the
    layer's.
    """
    (length, seed), (size, maps_seed) = proof.x, proof.maps
    x = drawn((1, length, WORKLOAD.hidden_size), seed, device)
    maps = ChainMaps.draw(length, size, maps_seed, device)
    _verify(maps, proof.weights, x, proof.chain, most, own=own)


def _verify(
    maps: ChainMaps,
    weights: Mapping[str, Tensor],
    x: Tensor,
    chain: Chain,
    most: int = MAX_CALLS,
    *,
    own: bool = False,
) -> None:
    checker = Checker.draw(x.device, own=own)
    digests, calls = chain.digests.to(x.device, torch.float32), len(chain.digests)
    checker.bound("digests: size", f"{calls} calls", float(digests.abs().max()), LARGEST)
    count = min(calls, most)
    chosen = [*random.SystemRandom().sample(range(calls - 1), count - 1), calls - 1]
    keys = fill_keys(torch.empty_like(digests), chain.seed)[chosen]
    before = torch.cat((torch.zeros_like(digests[:1]), digests[:-1]))[chosen]
    at_once = SEGMENT // RUN
    parts = zip(torch.split(keys, at_once), torch.split(before, at_once), strict=True)
    sums = torch.cat([_sums(maps, weights, x, maps.factors(*part)) for part in parts])
    apart = digests[chosen] - sums
    error, where = checker.limits.layer / STEP, f"{count} of {calls} calls"
    square = float(apart.square().mean())
    checker.bound("digests: largest difference", where, float(apart.abs().max()), 0.5 + 6 * error)
    # rounding has a mean square of 1/12, with a standard deviation of 0.0745
    limit = 1 / 12 + error**2 + 5 * 0.0745 / math.sqrt(apart.numel())
    checker.bound("digests: mean square difference", where, square, limit)
    wrong = [str(check) for check in checker.worst.values() if not check.passed]
    if wrong:
        raise WorkerError(f"the timed calls did not compute the layer: {wrong[0]}", "gate")


def _sums(maps: ChainMaps, weights: Mapping[str, Tensor], x: Tensor, factors: Tensor) -> Tensor:
    """Return the unrounded digests `[calls, channels]` of the calls with these `factors`."""
    sums, first = torch.zeros_like(factors), 0
    for y in outputs(weights, x, factors):
        sums += maps.sums(y, first)
        first += -(-y.shape[1] // RUN)
    return sums
