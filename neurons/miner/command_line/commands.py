"""The commands status, doctor, logs, release and abandon."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import click

from harness.terminal import counted, printable
from neurons.embedded.settings import embedded_settings, is_embedded
from neurons.miner import daemon
from neurons.miner.command_line import doctor as doctor_checks
from neurons.miner.command_line import kernel_checks
from neurons.miner.command_line.machine_checks import Finding, failure, machine
from neurons.miner.command_line.options import as_json
from neurons.miner.command_line.status import find_journal, read_status, summary, wrong_user_error
from neurons.miner.cycle import State, Submission
from neurons.miner.journal import Journal
from neurons.runtime import observe
from neurons.runtime.errors import ConfigError, Problem
from neurons.runtime.flags import CommandLineSettings, Whole
from neurons.runtime.identity import public_hotkey
from neurons.runtime.loading import Process, Sources, environment
from neurons.runtime.machine import resolve_device
from neurons.runtime.settings import Settings

WATCH_SECONDS = 1.0


def echo(text: str, stream: TextIO | None = None) -> None:
    """Print `text` without secrets and control characters to `stream`, by default stdout."""
    stream = stream or sys.stdout
    stream.write(_without_secrets(text) + "\n")
    stream.flush()


def _without_secrets(text: str) -> str:
    """Return lines of text without secrets and terminal control characters."""
    return printable(observe.redact(text), allowed="\n")


def read_settings(
    given: CommandLineSettings, process: Process | None = "miner"
) -> tuple[Settings, bool]:
    """Return the settings, and whether this is a trial on an embedded subnet.

    The settings that `process` requires must be present; None requires none. Raises a ConfigError
    with all problems.
    """
    embedded = _is_trial(given)
    if embedded:
        settings = embedded_settings(given.settings, environment())
    else:
        settings = given.sources.settings(process)
    for secret in settings.secrets():
        observe.register_secret(secret)
    if settings.pytorch_cuda_alloc_conf:  # the measuring processes inherit the environment
        environment()["PYTORCH_CUDA_ALLOC_CONF"] = settings.pytorch_cuda_alloc_conf
    return settings.model_copy(update={"device": resolve_device(settings.device)}), embedded


def log_file(given: CommandLineSettings) -> Path:
    """Return the path of the miner's log, even if its settings cannot be read."""
    folder = given.sources.state_dir()
    with suppress(ConfigError):
        if _is_trial(given):
            folder /= "embedded"
    return folder / "logs" / "miner.log"


def _is_trial(given: CommandLineSettings) -> bool:
    """Return whether this is a trial, on a subnet that runs on this machine.

    It is one if there is neither a .env nor a setting of a real subnet.

    Raises a ConfigError if there is a real miner's journal. Otherwise a process manager would
    restart that miner as a trial while its commitment waits for the reveal.
    """
    if not is_embedded(given.sources):
        return False
    folder = given.sources.state_dir()
    if not given.sources.without_file and find_journal(folder):
        problem = f"There is no .env, but {folder} holds the journal of a miner of a real subnet."
        remedy = "Put .env back, or name it with --env-file. --env-file /dev/null runs a trial."
        raise ConfigError(Problem(problem, remedy))
    return True


@as_json
@click.option("--watch", is_flag=True, help="Show it again every second until Ctrl-C.")
@click.option(
    "--history",
    metavar="[N]",
    type=Whole(0, 1000),
    is_flag=False,
    flag_value=20,
    default=0,
    help="Add the last N submissions (20 without N).",
)
def status(given: CommandLineSettings, as_json: bool, watch: bool, history: int) -> int:
    """Show the submission's state and the next action."""
    hotkey = None
    try:
        settings, _ = read_settings(given, process=None)
        folder, hotkey = settings.state_dir, public_hotkey(*settings.miner_wallet)
    except ConfigError as error:
        path = given.sources.path
        if path is None or not os.access(path, os.R_OK, effective_ids=True):
            raise  # the .env that is lost or cannot be read may name another folder
        echo(str(error), sys.stderr)
        folder = log_file(given).parent.parent

    def read() -> str:
        found = read_status(folder, hotkey, history)
        text = json.dumps(found.as_json(), indent=2) if as_json else found.as_text()
        return _without_secrets(text)

    if watch and not as_json:
        _watch(read)
    else:
        echo(read())
    return 0


def _watch(read: Callable[[], str]) -> None:
    """Show the text of `read` until Ctrl-C: in place on a terminal, else whenever it changes."""
    import rich.live  # here, because it takes a tenth of a second

    console = rich.console.Console(highlight=False, markup=False, emoji=False)
    last = ""
    with rich.live.Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            text = read()
            if console.is_terminal:
                live.update(rich.text.Text(text), refresh=True)
            elif text != last:
                console.print(text, soft_wrap=True)
            last = text
            time.sleep(WATCH_SECONDS)


@as_json
@click.option("--kernels", is_flag=True, help="Only compile and run the CUDA kernels.")
def doctor(given: CommandLineSettings, as_json: bool, kernels: bool) -> int:
    """Check this machine and its settings, with remedies."""
    if kernels:
        settings, _ = read_settings(given, process=None)
        return _failed(_print_findings(kernel_checks.examine(settings.device), as_json, gap=" -> "))
    findings = []
    try:
        settings, embedded = read_settings(given)
    except ConfigError as error:
        findings = [failure("settings", *one) for one in error.problems]
        folder = given.sources.state_dir()
        readable = {"state_dir": folder, "device": resolve_device("auto")}
        findings += machine(Sources(readable, Path(os.devnull), {}).settings())
    else:
        findings += doctor_checks.examine(settings, embedded=embedded)
    printed = _print_findings(findings, as_json, gap=f"\n{'':23}-> ")
    if not as_json:
        levels = [one.level for one in printed]
        end = "correct the failures first" if _failed(printed) else "the miner can start"
        found = [counted(levels.count(level), level) for level in ("failure", "warning")]
        echo(f"{', '.join(found)}: {end}")
    return _failed(printed)


def _print_findings(findings: Iterable[Finding], as_json: bool, gap: str) -> list[Finding]:
    """Print each finding as soon as it is made, with `gap` before its remedy; return them all."""
    printed = []
    for one in findings:
        printed.append(one)
        if not as_json:
            remedy = f"{gap}{one.remedy}" if one.remedy else ""
            echo(f"{one.level:<8} {one.name:<13} {one.detail}{remedy}")
    if as_json:
        echo(json.dumps([asdict(one) for one in printed], indent=2))
    return printed


def _failed(findings: Iterable[Finding]) -> int:
    return int(any(one.level == "failure" for one in findings))


@click.option("-n", "--lines", type=Whole(0, 10**9), metavar="N", default=20, help="How many (20).")
@click.option("--no-follow", is_flag=True, help="End after these lines.")
def logs(given: CommandLineSettings, lines: int, no_follow: bool) -> int:
    """Show the end of the log, and follow it until Ctrl-C."""
    path = log_file(given)
    try:
        path.open("rb").close()
    except PermissionError:
        raise wrong_user_error(path.parent.parent) from None
    except OSError:
        echo(f"there is no log yet at {path}: the miner writes it when it runs")
        return 1
    follow = [] if no_follow else ["-F"]
    # tail, which replaces this process, keeps following a rotated log
    command = ["tail", "-n", str(lines), *follow, "--", str(path)]
    raise SystemExit(os.execvp(command[0], command))  # noqa: S606


def release(given: CommandLineSettings) -> int:
    """Resume a held submission."""
    return _decide(given, daemon.release)


def abandon(given: CommandLineSettings) -> int:
    """End a held submission without a verdict."""
    return _decide(given, daemon.abandon)


def _decide(
    given: CommandLineSettings, act: Callable[[Journal, Submission, float], Submission]
) -> int:
    settings, _ = read_settings(given, process=None)
    path = find_journal(settings.state_dir)
    if path is None:
        echo(f"nothing has run in {settings.state_dir}")
        return 0
    with Journal(path) as journal:
        held = [one for one in journal.live_submissions() if one.state is State.HELD]
        for submission in held:
            echo(summary(act(journal, submission, time.time()), settings.state_dir))
    if not held:
        echo("nothing is held")
    return 0
