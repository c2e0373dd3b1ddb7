"""The commands that look, measure or decide, and start no daemon."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from harness.source import tree_commit
from harness.stats import table
from neurons import observe
from neurons.command_line import doctor, kernel_checks
from neurons.command_line.findings import Finding, failure
from neurons.command_line.machine_checks import machine
from neurons.command_line.status import JOURNAL, read_status, summary
from neurons.configuration.loading import Process, load_settings
from neurons.configuration.settings import Settings
from neurons.embedded.subnet import EmbeddedSubnet, embedded_settings, is_embedded
from neurons.errors import ConfigError, Retry
from neurons.mining.cycle import State, backoff_seconds
from neurons.mining.daemon import abandon, release
from neurons.mining.journal import Journal
from neurons.mining.publishing.from_settings import open_fork
from neurons.mining.series import MinerSeries, describe_machine, lengths_to_measure, new_series
from neurons.processes.machine import resolve_device
from neurons.processes.runtime import StateLock


def say(text: str, stream: TextIO | None = None) -> None:
    """Print `text` without secrets, to stdout unless a stream is given."""
    stream = stream or sys.stdout
    stream.write(observe.redact(text) + "\n")
    stream.flush()


def read_settings(
    given: argparse.Namespace, process: Process | None = "miner"
) -> tuple[Settings, bool]:
    """Return the settings and whether the run stays on this machine.

    Args:
        process: whose needs are checked; None for a command that only looks into the journal.

    Raises:
        ConfigError: every problem of the settings, one a line.
    """
    flags = {name: value for name, value in vars(given).items() if name in Settings.model_fields}
    if given.debug:
        flags["log_level"] = "DEBUG"
    embedded = is_embedded(flags, given.env_file, os.environ)
    if embedded:
        settings = embedded_settings(flags, os.environ)
    else:
        settings = load_settings(flags, given.env_file, process=process)
    for secret in settings.secrets():
        observe.register_secret(secret)
    if settings.pytorch_cuda_alloc_conf:  # the measuring processes take it from the environment
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings.pytorch_cuda_alloc_conf
    return settings.model_copy(update={"device": resolve_device(settings.device)}), embedded


def show_status(given: argparse.Namespace) -> int:
    """Carry out `status`: it only reads, so it works while the miner runs."""
    settings, _ = read_settings(given, process=None)
    status = read_status(settings.state_dir)
    say(json.dumps(status.as_json(), indent=2) if given.json else status.as_text())
    return 0


def show_doctor(given: argparse.Namespace) -> int:
    """Carry out `doctor`; return 1 when a check fails."""
    if given.kernels:
        settings, _ = read_settings(given, process=None)
        return _tell(kernel_checks.examine(settings.device), given.json, gap=" -> ")
    findings = []
    try:
        settings, embedded = read_settings(given)
    except ConfigError as error:
        # The machine's own checks need no settings, so they are still made.
        findings = [failure("settings", *one) for one in error.problems]
        settings = load_settings({}, Path(os.devnull), {})
        findings += machine(settings)
    else:
        findings += doctor.examine(settings, embedded=embedded)
    return _tell(findings, given.json, gap=f"\n{'':23}-> ")


def _tell(findings: Iterable[Finding], as_json: bool, gap: str) -> int:
    """Print each finding when it is there, `gap` before a remedy; return 1 for a failure."""
    told = []
    for one in findings:
        told.append(one)
        if not as_json:
            remedy = f"{gap}{one.remedy}" if one.remedy else ""
            say(f"{one.level:<8} {one.name:<13} {one.detail}{remedy}")
    if as_json:
        say(json.dumps([asdict(one) for one in told], indent=2))
    return int(any(one.level == "failure" for one in told))


def bench(given: argparse.Namespace) -> int:
    """Carry out `bench`: measure the fork as the miner will; nothing is submitted."""
    settings, embedded = read_settings(given)
    with StateLock(settings.state_dir):
        if embedded:
            settings = EmbeddedSubnet(settings, threading.Event()).settings
        fork = open_fork(settings)
        fork.prepare()
        target = settings.target_sequence_length
        environment = describe_machine(settings.device)
        lengths = lengths_to_measure(None if target == "auto" else target, environment.device)
        commit, log = tree_commit(fork.worktree), observe.get_logger("miner")
        series = new_series(settings, fork.worktree, environment, "bench", commit, log)
        _run(series, lengths)
    say(table(series.measurements, series.failures))
    say(f"report: {series.path}")
    return int(bool(series.failures))


def _run(series: MinerSeries, lengths: Iterable[int]) -> None:
    """Measure, and go on after what the miner goes on after."""
    while True:
        try:
            return series.run(lengths)
        except Retry as fault:
            series.crashes += 1
            series.log.warning("trying again", reason=fault.reason)
            time.sleep(backoff_seconds(series.crashes, jitter=1.0))


def decide(given: argparse.Namespace) -> int:
    """Carry out `release` or `abandon`: a person's word on what is held."""
    settings, _ = read_settings(given, process=None)
    act = release if given.command == "release" else abandon
    path = settings.state_dir / JOURNAL
    if not path.is_file():
        say(f"nothing has run in {settings.state_dir}")
        return 0
    with Journal(path) as journal:
        held = [one for one in journal.live_submissions() if one.state is State.HELD]
        for submission in held:
            say(summary(act(journal, submission, time.time()), settings.state_dir))
    if not held:
        say("nothing is held")
    return 0
