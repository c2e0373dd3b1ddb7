"""The miner: `./START_MINER.sh COMMAND` (--help lists them), or `python -m neurons.miner`.

The composition root: it reads the settings, creates all objects and starts the daemon. Nothing in
this process imports torch.
"""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_on_ctrl_c()  # during the imports below

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import click

if not __package__:  # run as a file: Python has put this folder instead of the project on the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from neurons.embedded.subnet import QUIET_SECONDS, EmbeddedSubnet
from neurons.miner.alerts import Alerts
from neurons.miner.alerts import ways as alert_ways
from neurons.miner.api_address import absent
from neurons.miner.command_line import backup, commands, options
from neurons.miner.command_line.backup import require_no_lost_journal
from neurons.miner.command_line.bench import bench
from neurons.miner.command_line.commands import echo, log_file, read_settings
from neurons.miner.command_line.metrics import serving
from neurons.miner.command_line.options import Commands, add_command, of_the_public_miner, shared
from neurons.miner.command_line.status import JOURNAL, summary
from neurons.miner.context import Context
from neurons.miner.cycle import BEFORE_COMMITMENT, State, Submission
from neurons.miner.daemon import run_cycle, run_forever, warn_at_start
from neurons.miner.journal import Journal
from neurons.miner.publishing.github import open_fork
from neurons.miner.publishing.tuned_kernels import TunedKernels
from neurons.miner.tuner import Tuner
from neurons.miner.watcher import Watcher
from neurons.runtime import observe
from neurons.runtime.errors import EX_CONFIG, ConfigError, QuasarError
from neurons.runtime.flags import CONTEXT, CommandLineSettings, run_command, show_version
from neurons.runtime.heartbeat import notify
from neurons.runtime.identity import load_identity, wallet_warnings
from neurons.runtime.loading import environment
from neurons.runtime.process import StateLock, Stopped, stop_on_signals, wait_for_space, wait_unless
from neurons.runtime.settings import Settings
from neurons.wire.client import ApiClient

TO_THE_REAL_SUBNET = (
    "this ran only on this machine; to mine for a subnet that runs this competition: cp "
    ".env.example .env, fill it in, and start again"
)

ALERTS_SECONDS = 5.0
"""Limit in seconds on sending the waiting alerts at the end; a stop has GRACE_SECONDS in all."""

log = observe.get_logger("miner")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1, or 78 if the operator must act."""
    observe.configure()
    earlier = os.umask(0o077)  # also for SQLite's files; the units of systemd set the same
    try:
        return run_command(cli, options.SCRIPT, arguments)
    except ConfigError as error:
        echo(str(error), sys.stderr)
        return EX_CONFIG
    except Stopped:
        return 0
    except KeyboardInterrupt:
        return 130
    except QuasarError as error:
        echo(str(error), sys.stderr)
        return 1
    finally:
        os.umask(earlier)


@click.group(cls=Commands, invoke_without_command=True, context_settings=CONTEXT)
@shared
@of_the_public_miner
@show_version
@click.pass_context
def cli(context: click.Context) -> int | None:
    """The QUASAR miner. Without a command it mines until it is stopped.

    `./START_MINER.sh help COMMAND` explains a command and its flags.
    """
    if context.invoked_subcommand is not None:
        return None
    return mine(context.ensure_object(CommandLineSettings))


def run(given: CommandLineSettings) -> int:
    """Mine until stopped (the default)."""
    return mine(given)


def once(given: CommandLineSettings) -> int:
    """Run one cycle; status 0 if it is validated or ranked."""
    return mine(given, once=True)


def mine(given: CommandLineSettings, *, once: bool = False) -> int:
    """Do `run` or `once`; also write the error that ends it to the log file."""
    try:
        return _mine(given, once=once)
    except Stopped:
        raise
    except QuasarError as error:
        observe.append(log_file(given), str(error))
        raise


def _mine(given: CommandLineSettings, *, once: bool) -> int:
    settings, embedded = read_settings(given)
    stop = threading.Event()
    with stop_on_signals(stop, as_failure=once) as received, ExitStack() as stack:
        if once:
            # a stop ends the block without an error; the status is then that of the signal
            stack.push(lambda kind, *_: kind is Stopped)
        wait_for_space(settings.state_dir, partial(wait_unless, stop))
        stack.enter_context(StateLock(settings.state_dir))
        observe.configure(
            settings.log_level, settings.log_format, file=log_file(given), ordinary=sys.stdout
        )
        for problem in settings.warnings:  # they may explain why the start fails
            log.warning(str(problem))
        if embedded:
            log.info("no .env: the fork, the validator API and the validator are on this machine")
        with _context(settings, embedded, stop, given.script(environment())) as context:
            _log_start(context)
            where = context.settings.state_dir, settings.metrics_port
            stack.enter_context(serving(*where, context.identity.hotkey))
            stack.callback(notify, "STOPPING=1")
            notify("READY=1", f"STATUS=mining with {context.settings.validator_api_url}")
            if once:
                status = _once(context, embedded)
                return 128 + received[0] if received else status

            def after_cycle(submission: Submission) -> None:
                if embedded and submission.closed:
                    log.info(TO_THE_REAL_SUBNET)

            run_forever(context, after_cycle)
    return 128 + received[0] if once else 0


@contextmanager
def _context(
    settings: Settings, embedded: bool, stop: threading.Event, script: str
) -> Iterator[Context]:
    """Create the context; the embedded subnet, if there is one, runs during the block."""
    with ExitStack() as stack:
        if embedded:
            subnet = stack.enter_context(EmbeddedSubnet(settings, stop))
            settings, me = subnet.settings, subnet.identity
        else:
            me = load_identity(*settings.miner_wallet)
        client = ApiClient(str(settings.validator_api_url), me, wait=partial(wait_unless, stop))
        stack.callback(client.close)
        path = settings.state_dir / JOURNAL
        require_no_lost_journal(settings, me.hotkey, script)
        journal = stack.enter_context(Journal(path))
        alerts = Alerts(alert_ways(settings), settings.state_dir / "alerts.json", me.hotkey, log)
        stack.callback(alerts.close, ALERTS_SECONDS)
        for submission in journal.live_submissions():
            observe.register_secret(submission.salt or "")
        tuned = TunedKernels(settings.state_dir, settings.fork_scope)
        fork = open_fork(settings, stop=stop)
        context = Context(
            settings=settings,
            identity=me,
            journal=journal,
            client=client,
            fork=fork,
            content_digest=tuned.digest,
            log=log,
            stop=stop,
            script=script,
            alerts=alerts,
            watcher=Watcher(settings, me.hotkey, path, alerts, log, stop),
            tuner=Tuner(settings, tuned, fork.worktree, log),
        )
        if embedded:
            context.quiet_seconds = QUIET_SECONDS
            stack.callback(subnet.check)
        yield context


def _log_start(context: Context) -> None:
    settings = context.settings
    for problem in wallet_warnings(*settings.miner_wallet):
        log.warning(str(problem))
    warn_at_start(context)
    if tuned := TunedKernels(settings.state_dir).evidence():
        log.info("publishing kernels that were tuned here", gain=f"{tuned.ratio - 1:+.1%}")
    if settings.device == "cpu":
        log.info(
            "no GPU: only short lengths are measured; speeds on a shared CPU vary, so claims "
            "should be well below them",
            headroom=settings.claim_headroom,
        )
    log.info(
        "miner starts",
        hotkey=context.identity.hotkey,
        target=settings.target_sequence_length,
        scope=settings.fork_scope,
        device=settings.device,
        api=settings.validator_api_url,
        state=str(settings.state_dir),
    )
    if context.watcher:
        context.watcher.start()


def _once(context: Context, embedded: bool) -> int:
    live = context.journal.live_submissions(context.identity.hotkey)
    uncommitted = all(one.position in BEFORE_COMMITMENT for one in live)
    if uncommitted and context.client.serves_competition() is False:
        raise ConfigError(f"{absent(context)}.")
    submission = run_cycle(context)
    echo(summary(submission, context.settings.state_dir))
    if context.stop.is_set():
        echo("stopped; the next start continues from here")
        return 0
    if embedded:
        echo(TO_THE_REAL_SUBNET)
    return 0 if submission.state in (State.VALIDATED, State.RANKED) else 1


_COMMANDS: dict[str, Callable[..., int]] = {
    "run": run,
    "once": once,
    "status": commands.status,
    "logs": commands.logs,
    "doctor": commands.doctor,
    "bench": bench,
    "release": commands.release,
    "abandon": commands.abandon,
    "backup": backup.backup,
    "restore": backup.restore,
    "help": options.explain,
    "version": options.show_version,
    "completion": options.completion,
}
for _name, _command in _COMMANDS.items():
    add_command(cli, _name, _command)


if __name__ == "__main__":
    interrupts.run(main)
