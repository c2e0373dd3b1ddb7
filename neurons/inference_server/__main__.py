"""`python -m neurons.inference_server`: answers POST /inference with the reference model.

It loads REFERENCE_MODEL once, decodes greedily, and returns the logits of one step, which a
validator compares with those of its own server. Unlike the miner's process, this one loads torch.
"""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_on_ctrl_c()  # during the imports below

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from neurons.inference_server.queue import Decodes, Decoding
from neurons.runtime import flags, observe
from neurons.runtime.errors import ConfigError, Problem
from neurons.runtime.identity import public_hotkey
from neurons.runtime.machine import resolve_device
from neurons.runtime.process import stop_signals
from neurons.runtime.server import Server, listen
from neurons.runtime.settings import Settings

if TYPE_CHECKING:
    from neurons.inference_server.app import ValidatorRequests

log = observe.get_logger("inference")


@click.command(help="Answers with the reference model.", context_settings=flags.CONTEXT)
@click.option("--port-file", metavar="FILE", type=flags.FILE, help="Write the port there.")
@flags.env_file
@flags.logging
@flags.show_version
@click.make_pass_decorator(flags.CommandLineSettings, ensure=True)
def command(given: flags.CommandLineSettings, port_file: Path | None) -> int:
    return flags.start("inference", given, log, lambda settings: run(settings, port_file))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (78: a configuration error)."""
    return flags.run_command(command, "python -m neurons.inference_server", arguments)


def run(settings: Settings, port_file: Path | None = None) -> int:
    """Serve until a signal.

    Raises a ConfigError for a missing dependency, an address that cannot be bound, or a model that
    cannot be loaded.
    """
    try:
        from neurons.inference_server.app import Limits, create_app
    except ModuleNotFoundError as error:
        remedy = "Run scripts/install.sh inference."
        raise ConfigError(Problem(f"{error.name} is not installed.", remedy)) from None
    device = resolve_device(settings.device)
    decoding = Decoding(lambda: _load(settings, device), settings.inference_queue)
    limits = Limits(settings.max_prompt_tokens, settings.max_new_tokens)
    app = create_app(
        *(decoding, _shown(settings.reference_model), device, limits),
        signed=_validators(settings),
        trusted_proxies=settings.trusted_proxies,
    )
    server = Server(app, _log_ready, port_file)

    def stop(*_: object) -> None:
        server.should_exit = True

    # for SIGHUP; uvicorn handles the other signals, and raises them again afterwards
    for number in stop_signals():
        signal.signal(number, stop)
    place = listen(
        settings.inference_host,
        settings.miner_inference_port,
        ("INFERENCE_HOST", "MINER_INFERENCE_PORT"),
    )
    asyncio.run(_serve(server, decoding, place))
    if decoding.fault:
        raise ConfigError(
            Problem(
                f"REFERENCE_MODEL={settings.reference_model} cannot be loaded ({decoding.fault}).",
                "Give the name of a model of the hub, or the folder of one on this machine.",
            )
        )
    return 0


def _validators(settings: Settings) -> ValidatorRequests:
    """Return the check of validators' signatures; warn if it can accept none."""
    from neurons.inference_server.app import ValidatorRequests

    hotkey = settings.inference_hotkey or public_hotkey(*settings.miner_wallet)
    unnamed = settings.accept_unnamed_recipients
    effect = "other clients can keep validators waiting until a check of the logits fails"
    if not settings.validator_hotkeys:
        log.warning(f"VALIDATOR_HOTKEYS is empty: {effect}")
    elif hotkey is None and not unnamed:
        remedy = "Set INFERENCE_HOTKEY to the miner's hotkey."
        log.warning(f"the miner's hotkey is unknown: {effect}", remedy=remedy)
    return ValidatorRequests(settings.validator_hotkeys, hotkey, unnamed=unnamed)


def _load(settings: Settings, device: str) -> Decodes:
    from neurons.inference_server.model import Decoder, load_model

    model = load_model(settings.reference_model, device, settings.inference_dtype)
    compiled = settings.inference_compile and device == "cuda"
    return Decoder(model, compiler="inductor" if compiled else None)


def _shown(model: str) -> str:
    """Return a model's name as clients see it: for a folder on this machine, its last component."""
    return Path(model).name if Path(model).is_absolute() or Path(model).is_dir() else model


def _log_ready(host: str, port: int) -> None:
    log.info("inference server listens", host=host, port=port)


async def _serve(server: Server, decoding: Decoding, place: socket.socket) -> None:
    """Serve until a signal or until the model has failed to load."""
    serving = asyncio.create_task(server.serve(sockets=[place]))
    while not serving.done():
        await asyncio.wait({serving}, timeout=0.5)
        server.should_exit = server.should_exit or bool(decoding.fault)
    await serving


if __name__ == "__main__":
    interrupts.run(main)
