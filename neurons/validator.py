"""`python -m neurons.validator`: judges the submissions that the validator API queues.

It clones each revealed fork into a sandbox, checks the fork's rules, times it with the harness,
compares the speed with the claim and writes the score. torch is loaded in child processes only.
Those run a stranger's code with this user's rights: give a validator an account or a container of
its own, with nothing in it but its hotkey.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial

import click

from neurons import observe
from neurons.configuration import flags
from neurons.configuration.settings import Settings
from neurons.errors import ConfigError
from neurons.identity import load_identity
from neurons.processes.heartbeat import heartbeat
from neurons.processes.runtime import StateLock, Stopped, stop_on_signals
from neurons.protocol import QueuedSubmission
from neurons.validation import sandbox
from neurons.validation.api import ApiFault, ValidatorApi
from neurons.validation.evaluate import Evaluator
from neurons.validation.verdict import Verdict

OWN_FAULTS = 3
"""Unexpected errors of ours on one submission after which it waits for the next start."""

log = observe.get_logger("validator")


class Validator:
    """Polls the queue and judges what is in it, one submission at a time."""

    def __init__(self, api: ValidatorApi, evaluator: Evaluator, stop: threading.Event) -> None:
        self._api = api
        self._evaluator = evaluator
        self._stop = stop
        self._unwritten: dict[int, Verdict] = {}
        self._faults: Counter[int] = Counter()

    def run_forever(self, interval: float) -> None:
        """Judge the queue every `interval` seconds until the stop."""
        while not self._stop.is_set():
            try:
                self.run_once()
            except ApiFault as error:
                log.warning("the API did not answer", reason=str(error), seconds=interval)
            self._stop.wait(interval)

    def run_once(self) -> None:
        """Judge what is in the queue now.

        Raises:
            ApiFault: the queue cannot be read.
            ConfigError: the API does not take this validator's verdicts.
        """
        for submission in self._api.queue():
            if self._stop.is_set():
                return
            if self._faults[submission.id] >= OWN_FAULTS:
                continue
            try:
                self._judge(submission)
            except Stopped:
                return
            except ConfigError:
                raise
            except Exception:  # one submission must not end the others' evaluation
                self._faults[submission.id] += 1
                log.exception("no verdict", submission=submission.id)

    def _judge(self, submission: QueuedSubmission) -> None:
        verdict = self._unwritten.get(submission.id)
        if verdict is None:
            log.info(
                "judging",
                submission=submission.id,
                hotkey=submission.miner_hotkey,
                fork=submission.fork_url,
                commit=submission.commit_hash,
                target=submission.target_sequence_length,
                claim=submission.tokens_per_sec,
            )
            with heartbeat(log, "judging", submission=submission.id):
                verdict = self._evaluator.evaluate(submission)
            self._unwritten[submission.id] = verdict
        try:
            self._write(submission, verdict)
        except ApiFault as error:  # kept: the next poll writes it without measuring again
            log.warning("verdict not written", submission=submission.id, reason=str(error))

    def _write(self, submission: QueuedSubmission, verdict: Verdict) -> None:
        self._api.mark(submission.id, verdict.score)
        del self._unwritten[submission.id]
        log.info(
            "verdict",
            submission=submission.id,
            score=round(verdict.score, 4),
            actual=verdict.actual,
            reason=verdict.reason,
        )
        if not verdict.passed and submission.ip_address:
            self._api.record_failure(submission.ip_address)


@click.command(
    help="Judges the submissions that the validator API queues.", context_settings=flags.CONTEXT
)
@click.option("--once", is_flag=True, help="Judge the queue once, then end.")
@flags.env_file
@flags.setting("--wallet.name", "wallet_validator_name", metavar="NAME", help="The wallet.")
@flags.setting("--wallet.hotkey", "wallet_hotkey", metavar="NAME", help="Its hotkey.")
@flags.setting(
    "--wallet.path", "wallet_path", type=flags.Folder(), metavar="DIR", help="Where wallets lie."
)
@flags.debug
@flags.show_version
@click.make_pass_decorator(flags.Given, ensure=True)
def command(given: flags.Given, once: bool) -> int:
    """Read the settings and judge."""
    return flags.start("validator", given, log, partial(run, once=once))


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge until told to stop; return the exit status (78: only a person can mend it)."""
    return flags.run_command(command, "python -m neurons.validator", arguments)


def run(settings: Settings, *, once: bool) -> int:
    """Judge the queue once, or until a signal; return the exit status.

    Raises:
        ConfigError: wallet, address, lock or the API's list of validators need a person.
    """
    folder = settings.state_dir / "validator"
    stop = threading.Event()
    wallet = (settings.wallet_validator_name, settings.wallet_hotkey, settings.wallet_path)
    identity = load_identity(*wallet)
    api = ValidatorApi(str(settings.validator_api_url), identity, stop=stop)
    evaluator = Evaluator(
        *(folder / "sandbox", settings.device, settings.bench_timeout_seconds),
        allow_file=api.on_loopback,
        stop=stop,
    )
    validator = Validator(api, evaluator, stop)
    with StateLock(folder), stop_on_signals(stop):
        sandbox.clear(evaluator.folder)
        log.info("validator ready", hotkey=identity.hotkey, api=settings.validator_api_url)
        try:
            if not once:
                validator.run_forever(settings.polling_interval)
                return 0
            validator.run_once()
        except ApiFault as error:
            log.error(str(error))
            return 1
        finally:
            api.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
