"""`python -m neurons.validator`: judges the submissions that the validator API queues.

It clones each revealed fork, checks rules and results, times it with the harness, compares the
speed with the claim and writes the score. Untrusted code and torch run only in child processes.
These are in a sandbox, unless SANDBOX is `off`, or is `preferred` and the sandbox does not work.
"""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_on_ctrl_c()  # during the imports below

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import click

from neurons.runtime import flags, observe
from neurons.runtime.errors import ConfigError
from neurons.runtime.heartbeat import notify
from neurons.runtime.identity import OFFLINE, Identity, load_identity, set_weights
from neurons.runtime.loading import environment
from neurons.runtime.machine import resolve_device
from neurons.runtime.process import StateLock, stop_on_signals
from neurons.runtime.settings import Settings
from neurons.runtime.values import HOTKEY
from neurons.validator.api import ApiFault, ValidatorApi
from neurons.validator.attempts import Attempts
from neurons.validator.clone import Sources, clear
from neurons.validator.devices import Gpu, find_gpus
from neurons.validator.evaluate import Evaluator
from neurons.validator.logits import LogitVerifier, parse_servers
from neurons.validator.loop import Validator
from neurons.validator.packages import check_imports
from neurons.validator.sandbox import Sandbox, open_sandbox
from neurons.validator.shares import evaluators_for
from neurons.validator.weights import WeightSetter
from neurons.wire.protocol import MAX_HOURS

log = observe.get_logger("validator")


@click.command(
    help="Judges the submissions that the validator API queues.", context_settings=flags.CONTEXT
)
@click.option("--once", is_flag=True, help="Judge the queue once, then end.")
@click.option("--again", is_flag=True, help="Retry submissions skipped after three crashes.")
@click.option(
    "--new-round",
    type=flags.Whole(1, MAX_HOURS),
    metavar="HOURS",
    help="End the running round, open one of that many hours, and judge nothing.",
)
@click.option(
    "--lift-ban", metavar="CLIENT", help="End a client's ban (an address or a hotkey), then end."
)
@click.option(
    "--withdraw",
    type=flags.Whole(0, 2**31 - 1),
    metavar="NUMBER",
    help="Give a submission the final score 0, then end.",
)
@click.option("--reason", default="", metavar="TEXT", help="Reason of --withdraw, on its page.")
@flags.env_file
@flags.chain
@flags.setting("--wallet.name", "wallet_validator_name", metavar="NAME", help="The wallet.")
@flags.setting("--wallet.hotkey", "wallet_hotkey", metavar="NAME", help="Its hotkey.")
@flags.setting(
    "--wallet.path", "wallet_path", type=flags.Folder(), metavar="DIR", help="Folder of wallets."
)
@flags.setting(
    "--neuron.polling_interval", "polling_interval", metavar="SECONDS", help="Pause between polls."
)
@flags.logging
@flags.NO_AXON
@flags.show_version
@click.make_pass_decorator(flags.CommandLineSettings, ensure=True)
def command(
    given: flags.CommandLineSettings,
    once: bool,
    again: bool,
    new_round: int | None,
    lift_ban: str | None,
    withdraw: int | None,
    reason: str,
) -> int:
    """Read the settings, and judge, or make one call."""

    def call(api: ValidatorApi) -> None:
        if new_round is not None:
            opened = api.create_round(new_round)
            end = opened.end_time
            log.info("round opened", round=opened.round_number, hours=new_round, end=end)
        elif lift_ban is not None:
            api.lift_ban(f"hotkey {lift_ban}" if HOTKEY.fullmatch(lift_ban) else lift_ban)
            log.info("ban lifted", client=lift_ban)
        elif withdraw is not None:
            api.withdraw(withdraw, reason)
            log.info("withdrawn", submission=withdraw, reason=reason)

    if (new_round, lift_ban, withdraw) == (None, None, None):
        return flags.start("validator", given, log, partial(run, once=once, again=again))
    return flags.start("validator", given, log, partial(call_once, call=call))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (78: a configuration error)."""
    return flags.run_command(command, "python -m neurons.validator", arguments)


def run(settings: Settings, *, once: bool, again: bool = False) -> int:
    """Judge the queue once, or until a signal; return the exit status.

    Raises a ConfigError if the operator must correct the wallet, the address, the sandbox or the
    packages, if another process uses the state folder, or if the API does not accept the hotkey.
    """
    folder = settings.state_dir / "validator"
    stop = threading.Event()
    api = _api(settings, stop)
    with StateLock(folder), stop_on_signals(stop), closing(api):
        on_gpu = resolve_device(settings.device) == "cuda"
        gpus = find_gpus(environment()) if on_gpu else []
        confinement = _confinement(settings, stop, gpus[0] if gpus else None)
        evaluator = Evaluator(
            *(folder / "clones", settings.device, settings.bench_timeout_seconds),
            sources=Sources(settings.fork_hosts, settings.allow_file_forks),
            stop=stop,
            confinement=confinement,
        )
        clear(evaluator.folder)
        attempts = Attempts(folder / "attempts.sqlite", str(settings.validator_api_url))
        if again:
            log.info(
                "submissions are tried again after crashes", submissions=attempts.reset_crashes()
            )
        parts = _weight_setter(settings, api), _logit_verifier(settings, api.signer, stop)
        evaluators = evaluators_for(evaluator, gpus)
        validator = Validator(api, evaluators, attempts, stop, *parts)
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


def call_once(settings: Settings, *, call: Callable[[ValidatorApi], None]) -> int:
    """Make an organiser's call, even while a validator judges the queue; return the exit status.

    Raises a ConfigError if the wallet or the address is wrong, or the API does not accept the
    hotkey.
    """
    with closing(_api(settings, threading.Event())) as api:
        try:
            call(api)
        except ApiFault as error:
            log.error(str(error))
            return 1
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
    settings: Settings, signer: Identity, stop: threading.Event
) -> LogitVerifier | None:
    if not settings.enable_logit_verification:
        return None
    return LogitVerifier(
        reference=settings.reference_inference_url,
        servers=parse_servers(settings.inference_servers),
        min_cosine=settings.cosine_sim_threshold,
        max_difference=settings.max_abs_diff_threshold,
        stop=stop,
        signer=signer,
    )


def _confinement(settings: Settings, stop: threading.Event, gpu: Gpu | None) -> Sandbox | None:
    """Return the sandbox for forks, or None to run them with this user's rights.

    Checks that a worker with this confinement can import its packages. Raises a ConfigError if it
    cannot, or if SANDBOX is `required` and no sandbox works.
    """
    reason = "SANDBOX=off"
    if settings.sandbox != "off":
        private = [settings.wallet_path, settings.state_dir]
        try:
            sandbox = open_sandbox(gpu, private)
            check_imports(sandbox, sandbox.packages.withheld, stop)
        except ConfigError as error:
            if settings.sandbox == "required":
                raise
            reason = str(error)
        else:
            if not sandbox.cores:
                log.warning("this machine has one core: a fork can slow down everything else")
            return sandbox
    log.warning(
        "no sandbox: forks run with this user's rights, may read its hotkey and write verdicts",
        reason=reason,
    )
    check_imports(None, {}, stop)
    return None


if __name__ == "__main__":
    interrupts.run(main)
