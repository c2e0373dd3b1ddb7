"""Candidates of a search for tiles on this GPU: checked against the definition, then timed."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from harness.analysis.difference import Block, take_block
from harness.tuning.clock import graph_ms, poison, soak
from harness.tuning.footprint import Footprint, footprint, launched, warps_of_gpu
from harness.tuning.inputs import NOISE, WIDTH, correlated, layer_like
from harness.tuning.study import Objective, Refused, Report, Tiles
from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, relative_rms

LIMITS = {"layer": 6e-3, "correlated": 9e-3}
"""Largest accepted relative RMS error in bf16, by kind of input."""
CHECKED_TOKENS = 4000


def errors_of(scan: Any, tiles: Any) -> dict[str, float]:
    """Return the output's relative RMS errors by kind of input; NaN if a part was not written."""
    layer = layer_like(CHECKED_TOKENS)
    kinds = {"layer": layer, "correlated": correlated(layer, NOISE["correlated 10%"])}
    errors = {}
    for kind, inputs in kinds.items():
        expected = quasar_chunked(*inputs)[0]
        plan = scan.plan_segments(inputs[0], None, tiles, 5)
        poison()
        output = scan.forward(scan.ScanInputs.of(*inputs), plan=plan).o
        errors[kind] = relative_rms(output, expected)
    return errors


def require_working_gpu(reason: str) -> None:
    """End this process if a candidate's fault, such as an illegal address, broke its CUDA context.

    Every further candidate would be refused for that fault.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise SystemExit(
            f"a candidate {reason}. After that this process cannot use the GPU. Start the search "
            "again: it continues with other candidates."
        ) from error


class Candidates:
    """Checks and times tiles of the Triton operator: heads of `WIDTH`, bf16, on the first GPU.

    Args:
        lengths: in tokens, ascending; a candidate that is slow at short ones is not timed at longer
            ones.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        if not torch.cuda.is_available():
            raise SystemExit("tiles are searched on an NVIDIA GPU, and torch finds none here")
        mount()
        from fla.ops.quasar.triton_kernels import scan, tuning

        self._scan, self._lengths = scan, lengths
        self.gpus = [*map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]
        properties = self.gpus[0]
        self.gpu = {"gpu": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        self.name = f"{properties.name}, heads of {WIDTH}, bfloat16, {','.join(map(str, lengths))}"
        shipped = tuning.tiles_for(WIDTH, torch.bfloat16, torch.device("cuda", 0))
        self._of = type(shipped)
        self.shipped: Tiles = shipped._asdict()
        torch.manual_seed(0)
        self.footprint: Footprint = {}  # of the last checked candidate
        self._inputs = {tokens: layer_like(tokens) for tokens in lengths}
        soak(2)

    def objective(self, start: Tiles) -> Objective:
        """Return the objective: the geometric mean of a candidate's times over those of `start`."""
        before = {tokens: self._ms(start, tokens) for tokens in self._lengths}

        def mean_of_times(tiles: Tiles, report: Report) -> float:
            self._check(tiles)
            logs: list[float] = []
            for step, tokens in enumerate(self._lengths):
                logs.append(math.log(self._ms(tiles, tokens) / before[tokens]))
                report(step, math.exp(sum(logs) / len(logs)))
            return math.exp(sum(logs) / len(logs))

        return mean_of_times

    def compare(self, start: Tiles, best: Tiles, blocks: int) -> Iterator[Block]:
        """Yield blocks of speeds, in tokens/s at the longest length: A is the start, B the best."""
        tokens, order = self._lengths[-1], random.SystemRandom()

        def speed(tiles: Tiles) -> float:
            return tokens / self._ms(tiles, tokens)

        for _ in range(blocks):
            yield take_block(lambda: speed(start), lambda: speed(best), order)

    def _check(self, tiles: Tiles) -> None:
        chosen = self._of(**tiles)
        self.footprint = {}
        try:
            with launched() as kernels:
                errors = errors_of(self._scan, chosen)
        except Exception as error:  # too many resources, or an error of the compiler
            line = (str(error).splitlines() or [""])[0]
            reason = f"does not run: {type(error).__name__}: {line[:200]}"
            require_working_gpu(reason)
            raise Refused(reason) from error
        self.footprint = footprint(kernels, warps_of_gpu())
        for kind, limit in LIMITS.items():
            if not errors[kind] <= limit:
                raise Refused(f"wrong on {kind} inputs: {errors[kind]:.1e} is over {limit:.1e}")

    def _ms(self, tiles: Tiles, tokens: int) -> float:
        inputs = self._scan.ScanInputs.of(*self._inputs[tokens])
        plan = self._scan.plan_segments(inputs.v, None, self._of(**tiles), None)
        return graph_ms(functools.partial(self._scan.forward, inputs, plan=plan), warm=0.03)
