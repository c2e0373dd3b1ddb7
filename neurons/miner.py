"""The miner: `python -m neurons.miner COMMAND` (--help lists them), or neurons/miner.py itself.

The composition root: it reads the settings, builds the parts and hands them to the daemon.
Nothing in this process imports torch.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

if not __package__:  # run as a file: Python then puts this folder on the path, not the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from neurons import observe
from neurons.command_line.commands import (
    bench,
    decide,
    read_settings,
    say,
    show_doctor,
    show_status,
)
from neurons.command_line.status import JOURNAL, summary
from neurons.configuration.flags import Parser
from neurons.configuration.settings import Settings
from neurons.embedded.subnet import EmbeddedSubnet
from neurons.errors import EX_CONFIG, ConfigError, QuasarError
from neurons.identity import (
    OFFLINE,
    ChainUnreachable,
    Identity,
    load_identity,
    registered_uid,
    wallet_warnings,
)
from neurons.mining.client import ApiClient
from neurons.mining.context import Context, overlay_digest
from neurons.mining.cycle import State, Submission
from neurons.mining.daemon import run_cycle, run_forever, warn_of_other_hotkeys
from neurons.mining.early import warn_of_early_judgement
from neurons.mining.journal import Journal
from neurons.mining.publishing.from_settings import open_fork
from neurons.processes.runtime import StateLock, Stopped, Waiter, stop_on_signals, wait_for_space

TO_THE_REAL_SUBNET = (
    "this ran on this machine alone; to mine on the real subnet: cp .env.example .env, "
    "fill it in, and start again"
)

log = observe.get_logger("miner")


def parser() -> Parser:
    """Return the command line: flags have the names that operators know."""
    result = Parser(prog="python -m neurons.miner", description="The QUASAR miner.")
    add = result.add_argument
    add(
        "command",
        nargs="?",
        default="run",
        choices=["run", "once", "status", "doctor", "bench", "release", "abandon"],
        help="run: mine until stopped (default). once: one cycle, then exit. status: where the "
        "submission stands. doctor: check this machine. bench: measure, submit nothing. release: "
        "let a held submission go on. abandon: end a held submission without a verdict.",
    )
    add("--netuid", metavar="N", help="the subnet's number")
    add("--wallet.name", dest="wallet_miner_name", metavar="NAME", help="the wallet")
    add("--wallet.hotkey", dest="wallet_hotkey", metavar="NAME", help="its hotkey")
    add("--wallet.path", dest="wallet_path", metavar="DIR", type=_path, help="where wallets lie")
    add("--subtensor.network", dest="subtensor_network", metavar="NET", help="chain, or offline")
    add("--logging.debug", dest="debug", action="store_true", help="log more")
    add("--target-seq-len", dest="target_sequence_length", metavar="N|auto", help="target length")
    add("--agent-iterations", metavar="N", help="accepted; there is no tuner yet")
    add("--optimization-interval", metavar="SECONDS", help="pause between cycles")
    add("--repo-path", metavar="DIR", type=_path, help="a checkout of the fork to use")
    add("--env-file", metavar="FILE", type=_path, help="settings file (/dev/null: none)")
    add("--state-dir", metavar="DIR", type=_path, help="journal, clone, reports and log")
    add("--device", metavar="auto|cuda|cpu", help="where kernels run")
    add("--json", action="store_true", help="status and doctor: print JSON")
    add("--kernels", action="store_true", help="doctor: compile the CUDA kernels, and no more")
    return result


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1, or 78 when a person has to act."""
    given = parser().parse_args(arguments)
    observe.configure()
    try:
        return COMMANDS[given.command](given)
    except ConfigError as error:
        say(str(error), sys.stderr)
        return EX_CONFIG
    except Stopped:
        return 0
    except KeyboardInterrupt:
        return 130
    except QuasarError as error:
        say(str(error), sys.stderr)
        return 1


def mine(given: argparse.Namespace) -> int:
    """Carry out `run` or `once`."""
    settings, embedded = read_settings(given)
    stop = threading.Event()
    with stop_on_signals(stop), ExitStack() as stack:
        wait_for_space(settings.state_dir, Waiter(stop))
        stack.enter_context(StateLock(settings.state_dir))
        log_file = settings.state_dir / "logs" / "miner.log"
        observe.configure(settings.log_level, settings.log_format, file=log_file)
        if embedded:
            log.info("no .env: fork, validator API and validator are set up on this machine alone")
        with _context(settings, embedded, stop) as context:
            _greet(context, given)
            if given.command == "once":
                return _once(context, embedded)

            def after_cycle(submission: Submission) -> None:
                if embedded and submission.closed:
                    log.info(TO_THE_REAL_SUBNET)

            run_forever(context, after_cycle)
    return 0


@contextmanager
def _context(settings: Settings, embedded: bool, stop: threading.Event) -> Iterator[Context]:
    """Build every part; the embedded subnet lives as long as the context."""
    with ExitStack() as stack:
        if embedded:
            subnet = stack.enter_context(EmbeddedSubnet(settings, stop))
            settings, me = subnet.settings, subnet.identity
        else:
            me = load_identity(*settings.miner_wallet)
        client = ApiClient(str(settings.validator_api_url), me, wait=Waiter(stop))
        stack.callback(client.close)
        journal = stack.enter_context(Journal(settings.state_dir / JOURNAL))
        for submission in journal.live_submissions():
            observe.register_secret(submission.salt or "")
        yield Context(
            settings=settings,
            identity=me,
            journal=journal,
            client=client,
            fork=open_fork(settings, stop=stop),
            content_digest=partial(overlay_digest, settings.fork_scope),
            log=log,
            stop=stop,
        )


def _greet(context: Context, given: argparse.Namespace) -> None:
    """Say in a few lines what this run works with, and what is worth a warning."""
    settings = context.settings
    for problem in (*settings.warnings, *wallet_warnings(*settings.miner_wallet)):
        log.warning(str(problem))
    warn_of_other_hotkeys(context)
    warn_of_early_judgement(context)
    if given.agent_iterations:
        log.warning("--agent-iterations is ignored: there is no tuner yet")
    if settings.device == "cpu":
        log.info(
            "no GPU: only short lengths are measured; timings on a shared CPU vary, so claims "
            "should keep well below them",
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
    if settings.subtensor_network != OFFLINE:
        # The chain may take long to answer, and nothing waits for what it says.
        threading.Thread(
            target=_look_up_registration, args=(settings, context.identity), daemon=True
        ).start()


def _look_up_registration(settings: Settings, me: Identity) -> None:
    try:
        uid = registered_uid(me.hotkey, settings.netuid, settings.subtensor_network)
    except ChainUnreachable as error:
        log.warning(f"the registration is unknown: {error}")
        return
    if uid is None:
        command = f"btcli subnets register --netuid {settings.netuid}"
        log.warning("the hotkey is not registered on the subnet", remedy=command)
    else:
        log.info("the hotkey is registered", uid=uid, netuid=settings.netuid)


def _once(context: Context, embedded: bool) -> int:
    submission = run_cycle(context)
    say(summary(submission, context.settings.state_dir))
    if context.stop.is_set():
        say("stopped; the next start goes on from here")
        return 0
    if embedded:
        say(TO_THE_REAL_SUBNET)
    return 0 if submission.state in (State.VALIDATED, State.RANKED) else 1


COMMANDS = {
    "run": mine,
    "once": mine,
    "status": show_status,
    "doctor": show_doctor,
    "bench": bench,
    "release": decide,
    "abandon": decide,
}


if __name__ == "__main__":
    sys.exit(main())
