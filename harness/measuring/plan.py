"""Plans: which samples are missing, as pure functions of how many exist at each length.

Plans do not depend on speeds. Their arguments also name the lengths that have enough samples for a
claim (`claim.is_settled`), and those that failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from harness.claim import MAX_RUNS
from harness.sample import Failure, Kind

FIRST_RUNS = 5
"""Samples of the target in the first round: fewer are not enough even on a quiet GPU."""

FURTHER_RUNS = 5
"""Samples of the target in each later round."""


def _failed(failures: Sequence[Failure]) -> set[int]:
    return {failure.length for failure in failures}


@dataclass(frozen=True)
class EachLength:
    """The same number of samples at each length, the shortest length first.

    After a failure of a kind in `too_long`, longer lengths are not tried.
    """

    lengths: tuple[int, ...]
    runs: int = 1
    too_long: frozenset[Kind] = frozenset()

    def missing(
        self, sampled: Counter[int], _settled: Container[int], failures: Sequence[Failure]
    ) -> list[int]:
        """Return the length of each missing sample in order; failed lengths are omitted."""
        return [
            length
            for length in sorted({*self.lengths} - _failed(failures))
            for _ in range(self.runs - sampled[length])
        ]

    def implied(self, failures: Sequence[Failure]) -> list[Failure]:
        """Return a failure for each length above the shortest one that failed as too long."""
        limits = [failure for failure in failures if failure.kind in self.too_long]
        shortest = min(limits, key=lambda failure: failure.length, default=None)
        if shortest is None:
            return []
        reason = f"not tried, because {shortest.length} tokens failed: {shortest.reason}"
        return [
            Failure(length=length, kind=shortest.kind, reason=reason)
            for length in sorted({*self.lengths} - _failed(failures))
            if length > shortest.length
        ]


@dataclass(frozen=True)
class ForClaim:
    """Plan of the fewest samples that a claim for one target needs.

    The target is sampled until its noise is known. The other lengths that validators time are
    sampled once each. The rest of the first round's `at_once` processes sample the target: they
    import together with the others, and a further round would have to wait for imports again.
    """

    target: int
    others: tuple[int, ...] = ()
    runs: int = 1  # smallest number of samples of the target
    most: int = MAX_RUNS  # largest number of samples of the target
    at_once: int = 1  # processes of a round
    confirming: int = 0  # existing samples of the target that one further sample must confirm

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({self.target, *self.others}))

    def missing(
        self, sampled: Counter[int], settled: Container[int], failures: Sequence[Failure]
    ) -> list[int]:
        """Return the length of each missing sample; none once the target has failed."""
        if self.target in _failed(failures):
            return []
        missing = [n for n in self.lengths if n != self.target and not sampled[n]]
        runs, room = sampled[self.target], self.at_once - len(missing)
        if self.confirming:
            least = self.confirming + 1
        else:
            least = min(max(FIRST_RUNS, self.runs, 0 if runs else room), self.most)
        further = least - runs
        if further <= 0 and self.target not in settled:
            further = min(FURTHER_RUNS, self.most - runs)
        return missing + [self.target] * further

    def implied(self, failures: Sequence[Failure]) -> list[Failure]:
        """Return a failure of the target if one of the other lengths, `others`, failed."""
        first = next((failure for failure in failures if failure.length in self.others), None)
        if first is None or self.target in _failed(failures):
            return []
        reason = f"{first.length} tokens, which validators time too, failed: {first.reason}"
        return [Failure(length=self.target, kind=first.kind, reason=reason)]


Plan = EachLength | ForClaim
"""Which samples a measurement takes. `lengths` has all lengths, in tokens."""
