"""`python -m neurons.validator`: judges the submissions that the validator API queues.

It clones each revealed fork, checks its rules, times it with the harness, compares the speed with
the claim and writes the score. Whatever runs a stranger's code is a child process in a sandbox;
torch is loaded there only. An evaluation is noted before it begins: a validator that dies in it
goes on with the other submissions.
"""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_at_once()  # until all below is imported

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import click

from neurons.runtime import flags, observe
from neurons.runtime.errors import ConfigError, Postponed
from neurons.runtime.heartbeat import heartbeat, notify
from neurons.runtime.identity import OFFLINE, load_identity, set_weights
from neurons.runtime.machine import resolve_device
from neurons.runtime.process import StateLock, Stopped, stop_on_signals
from neurons.runtime.settings import Settings
from neurons.validator.api import ApiFault, ValidatorApi
from neurons.validator.attempts import Attempts
from neurons.validator.clone import Sources, clear
from neurons.validator.evaluate import Evaluator
from neurons.validator.logits import LogitVerifier, parse_servers
from neurons.validator.packages import check_imports
from neurons.validator.sandbox import Sandbox, open_sandbox
from neurons.validator.verdict import Verdict, refute
from neurons.validator.weights import WeightSetter
from neurons.wire.connection import Signer
from neurons.wire.protocol import MOST_HOURS, QueuedSubmission

BUSY_ALLOWED = 6
"""Postponements, an hour of them, after which a miner's busy inference server has failed."""

log = observe.get_logger("validator")


class Validator:
    """Polls the queue and judges what is in it, one submission at a time."""

    def __init__(
        self,
        api: ValidatorApi,
        evaluator: Evaluator,
        attempts: Attempts,
        stop: threading.Event,
        weights: WeightSetter | None = None,
        logits: LogitVerifier | None = None,
    ) -> None:
        self._api, self._evaluator, self._attempts = api, evaluator, attempts
        self._stop, self._weights, self._logits = stop, weights, logits
        self.timer: Callable[[], float] = time.monotonic

    def run_forever(self, interval: float) -> None:
        """Judge the queue every `interval` seconds until the stop."""
        while not self._stop.is_set():
            try:
                self.run_once()
            except ApiFault as error:
                log.warning("the API did not answer", reason=str(error), seconds=interval)
            self._stop.wait(interval)

    def run_once(self) -> None:
        """Judge what is in the queue now; what failed before comes after the rest.

        Raises:
            ApiFault: the queue cannot be read.
            ConfigError: the API does not take this validator's verdicts.
        """
        seen: set[int] = set()
        while not self._stop.is_set() and (submission := self._next(seen)) is not None:
            seen.add(submission.id)
            if not self._attempt(submission):
                return
        if self._weights is not None:
            self._weights.run_once()

    def _next(self, seen: set[int]) -> QueuedSubmission | None:
        """Return whose turn it is: each evaluation changes the order, and some take long."""
        waiting = [one for one in self._api.queue() if one.id not in seen]
        due = [one for one in waiting if self._attempts.is_due(one)]
        return min(due, key=self._attempts.turn, default=None)

    def _attempt(self, submission: QueuedSubmission) -> bool:
        """Judge a submission, or note why not; return whether to go on."""
        try:
            self._judge(submission)
        except Stopped:
            self._attempts.stop(submission)
            return False
        except ConfigError:
            self._attempts.stop(submission)
            raise
        except Postponed as fault:
            pause = self._attempts.postpone(submission, str(fault))
            log.warning(
                "postponed",
                submission=submission.id,
                reason=str(fault),
                remedy=fault.remedy or "none: it is tried again",
                seconds=round(pause),
            )
        except Exception as error:  # one submission must not end the others' evaluation
            self._attempts.postpone(submission, f"{type(error).__name__}: {error}")
            log.exception("no verdict", submission=submission.id)
        return True

    def _judge(self, submission: QueuedSubmission) -> None:
        verdict = self._attempts.of(submission).verdict
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
            self._attempts.begin(submission)
            began = self.timer()
            try:
                with heartbeat(log, "judging", submission=submission.id):
                    verdict = self._evaluator.evaluate(submission)
            finally:
                self._attempts.spend(submission, self.timer() - began)
            self._attempts.conclude(submission, verdict)
        try:
            self._write(submission, verdict)
        except ApiFault as error:  # kept: the next poll writes it without measuring again
            log.warning("verdict not written", submission=submission.id, reason=str(error))

    def _write(self, submission: QueuedSubmission, verdict: Verdict) -> None:
        found = None
        if verdict.passed and self._logits is not None:
            final = self._attempts.of(submission).faults >= BUSY_ALLOWED
            found = self._logits.verify(submission, final=final)
        if found is not None:
            log.info("logits", **found.model_dump(exclude_none=True))
            self._api.record_verification(found)
            if not found.verified:
                verdict = refute(verdict)
        basis = verdict.reason, verdict.measured or None, verdict.device
        self._api.mark(submission.id, verdict.score, *basis)
        self._attempts.forget(submission)
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
@click.option("--again", is_flag=True, help="Try again what was set aside after three deaths.")
@click.option(
    "--new-round",
    type=flags.Whole(1, MOST_HOURS),
    metavar="HOURS",
    help="End the round that runs, open one of so many hours, and judge nothing.",
)
@flags.env_file
@flags.setting("--wallet.name", "wallet_validator_name", metavar="NAME", help="The wallet.")
@flags.setting("--wallet.hotkey", "wallet_hotkey", metavar="NAME", help="Its hotkey.")
@flags.setting(
    "--wallet.path", "wallet_path", type=flags.Folder(), metavar="DIR", help="Where wallets lie."
)
@flags.debug
@flags.show_version
@click.make_pass_decorator(flags.Given, ensure=True)
def command(given: flags.Given, once: bool, again: bool, new_round: int | None) -> int:
    """Read the settings, and judge or open a round."""
    if new_round is not None:
        return flags.start("validator", given, log, partial(open_round, hours=new_round))
    return flags.start("validator", given, log, partial(run, once=once, again=again))


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge until told to stop; return the exit status (78: only a person can mend it)."""
    return flags.run_command(command, "python -m neurons.validator", arguments)


def run(settings: Settings, *, once: bool, again: bool = False) -> int:
    """Judge the queue once, or until a signal; return the exit status.

    Raises:
        ConfigError: wallet, address, lock or the API's list of validators need a person.
    """
    folder = settings.state_dir / "validator"
    stop = threading.Event()
    api = _api(settings, stop)
    with StateLock(folder), stop_on_signals(stop), closing(api):
        confinement = _confinement(settings, stop)
        evaluator = Evaluator(
            *(folder / "clones", settings.device, settings.bench_timeout_seconds),
            sources=Sources(settings.fork_hosts, settings.allow_file_forks),
            stop=stop,
            confinement=confinement,
        )
        clear(evaluator.folder)
        attempts = Attempts(folder / "attempts.sqlite", str(settings.validator_api_url))
        if again:
            log.info("what was set aside is tried again", submissions=attempts.forgive())
        parts = _weight_setter(settings, api), _logit_verifier(settings, api.signer, stop)
        validator = Validator(api, evaluator, attempts, stop, *parts)
        notify("READY=1")
        log.info("validator ready", hotkey=api.hotkey, api=settings.validator_api_url)
        try:
            if not once:
                validator.run_forever(settings.polling_interval)
                return 0
            validator.run_once()
        except ApiFault as error:
            log.error(str(error))
            return 1
        finally:
            attempts.close()
    return 0


def open_round(settings: Settings, *, hours: int) -> int:
    """End the round that runs and open the next, beside a validator that judges.

    Raises:
        ConfigError: wallet, address or the API's list of validators need a person.
    """
    with closing(_api(settings, threading.Event())) as api:
        try:
            opened = api.create_round(hours)
        except ApiFault as error:
            log.error(str(error))
            return 1
    log.info("round opened", round=opened.round_number, hours=hours, end=opened.end_time)
    return 0


def _api(settings: Settings, stop: threading.Event) -> ValidatorApi:
    identity = load_identity(*_wallet(settings), named_by="WALLET_VALIDATOR_NAME")
    return ValidatorApi(str(settings.validator_api_url), identity, stop=stop)


def _wallet(settings: Settings) -> tuple[str, str, Path]:
    return settings.wallet_validator_name, settings.wallet_hotkey, settings.wallet_path


def _weight_setter(settings: Settings, api: ValidatorApi) -> WeightSetter:
    on_chain = partial(
        set_weights,
        netuid=settings.netuid,
        network=settings.subtensor_network,
        wallet=_wallet(settings),
    )
    offline = not settings.set_weights or settings.subtensor_network == OFFLINE
    return WeightSetter(api, None if offline else on_chain, settings.weights_interval)


def _logit_verifier(
    settings: Settings, signer: Signer, stop: threading.Event
) -> LogitVerifier | None:
    if not settings.enable_logit_verification:
        return None
    return LogitVerifier(
        reference=settings.reference_inference_url,
        servers=parse_servers(settings.inference_servers),
        least_cosine=settings.cosine_sim_threshold,
        most_difference=settings.max_abs_diff_threshold,
        stop=stop,
        signer=signer,
    )


def _confinement(settings: Settings, stop: threading.Event) -> Sandbox | None:
    """Return what shuts forks in, once a worker in it was seen to import what it needs."""
    reason = "SANDBOX=off"
    if settings.sandbox != "off":
        private = [settings.wallet_path, settings.state_dir]
        try:
            gpu = resolve_device(settings.device) == "cuda"
            sandbox = open_sandbox(gpu=gpu, private=private)
            check_imports(sandbox, sandbox.packages.withheld, stop)
        except ConfigError as error:
            if settings.sandbox == "required":
                raise
            reason = str(error)
        else:
            if not sandbox.cores:
                log.warning("this machine has one core: a fork can slow down all that runs on it")
            return sandbox
    log.warning(
        "no sandbox: forks run with this user's rights, may read its hotkey and write verdicts",
        reason=reason,
    )
    check_imports(None, {}, stop)
    return None


if __name__ == "__main__":
    interrupts.run(main)
