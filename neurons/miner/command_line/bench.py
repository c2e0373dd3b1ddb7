"""The command `bench`: measures without submitting, and prints the claim that this allows."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

import click

from harness.analysis.stats import table
from harness.claim import NoClaim, derive_claim
from harness.sample import Sample
from harness.source import tree_commit
from harness.terminal import counted
from harness.workload import LENGTHS, lengths_for
from neurons.embedded.subnet import EmbeddedSubnet
from neurons.miner.command_line.commands import echo, read_settings
from neurons.miner.cycle import backoff_seconds
from neurons.miner.measuring import ClaimMeasurement, describe_machine, new_measurement
from neurons.miner.publishing.github import open_fork
from neurons.miner.recorder import progress_of
from neurons.miner.steps.prepare import best_claim
from neurons.miner.targets import targets_here
from neurons.runtime.errors import ConfigError, Fault
from neurons.runtime.flags import CommandLineSettings
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.observe import get_logger
from neurons.runtime.process import StateLock
from neurons.runtime.settings import Settings
from neurons.wire.client import LIST_BYTES
from neurons.wire.connection import Connection
from neurons.wire.protocol import Performer, QueuedSubmission, SubmissionStats
from neurons.wire.rules import weighted_score

REPLY_SECONDS = 10.0


@click.option("--all-lengths", is_flag=True, help="Measure every length, not only the claim's.")
def bench(given: CommandLineSettings, all_lengths: bool) -> int:
    """Measure as the miner does; submit nothing."""
    settings, embedded = read_settings(given)
    with StateLock(settings.state_dir):
        if embedded:
            settings = EmbeddedSubnet(settings, threading.Event()).settings
        fork = open_fork(settings)
        fork.prepare()
        hardware = describe_machine(settings.device)
        targets = targets_here(settings.target, hardware, settings)
        commit, log = tree_commit(fork.worktree), get_logger("miner")
        measurement = new_measurement(
            settings, fork.worktree, hardware, "bench", commit, log, fresh=True
        )
        progress = partial(progress_of, settings.state_dir)
        with heartbeat(log, "measuring", progress=progress):
            _with_retries(measurement, lambda: measurement.run_targets(targets))
            if all_lengths:
                lengths = lengths_for(settings.target or LENGTHS[-1], hardware.device)
                _with_retries(measurement, lambda: measurement.run_lengths(lengths))
    sampler = measurement.sampler
    echo(table(sampler.samples, sampler.failures))
    echo(f"report: {measurement.recorder.path}")
    for line in preview(sampler.samples, settings, with_place=not embedded):
        echo(line)
    return int(bool(sampler.failures))


def _with_retries(measurement: ClaimMeasurement, act: Callable[[], object]) -> None:
    """Call `act` until it succeeds; raise a fault for which the miner would hold a submission."""
    for failures in itertools.count(1):
        try:
            act()
            return
        except Fault as fault:
            if fault.held_after is not None and failures > fault.held_after:
                raise
            measurement.recorder.log.warning("trying again", reason=fault.reason)
            time.sleep(backoff_seconds(failures, jitter=1.0))


def preview(samples: Sequence[Sample], settings: Settings, *, with_place: bool) -> Iterator[str]:
    """Yield lines with the claim that the samples allow, its score, and its place if available."""
    by_length = {
        length: [one for one in samples if one.length == length]
        for length in {one.length for one in samples}
    }
    headroom = settings.claim_headroom
    try:
        if settings.target is None:
            claim = best_claim(by_length, headroom)
        else:
            claim = derive_claim(by_length, settings.target, headroom)
    except NoClaim as error:
        yield f"claim: none: {error}"
        return
    yield f"claim: {claim}"
    score = weighted_score(claim.tokens_per_sec, claim.target_sequence_length)
    line = f"weighted score: {score:,.1f}"
    url = settings.validator_api_url
    others = listed_scores(url) if with_place and url else None
    if others is not None:
        place = 1 + sum(other > score for other in others)
        line += f", place {place} among {counted(len(others), 'claim')} that {url} lists"
    yield line


def listed_scores(url: str) -> list[float] | None:
    """Return the weighted scores of the claims that the API lists; None if it does not answer."""
    route, query = "/get_submission_stats", {"limit": 100}
    try:
        with closing(Connection(url, None, reply_seconds=REPLY_SECONDS)) as api:
            stats = api.exchange("GET", route, SubmissionStats, query=query, reply_bytes=LIST_BYTES)
    except (Fault, ConfigError):
        return None
    rows: list[QueuedSubmission | Performer] = [*stats.recent_submissions, *stats.top_performers]
    return [
        weighted_score(row.tokens_per_sec, row.target_sequence_length)
        for row in {row.id: row for row in rows}.values()
        if row.tokens_per_sec
    ]
