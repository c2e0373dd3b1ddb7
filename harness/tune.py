"""Search better constants of the CUDA kernels for this GPU, and prove the gain.

    python -m harness.tune [--overlay DIR] [--target TOKENS] [--trials N] [--seconds N] [--gpus N]

A trial changes one constant of the best kernels so far (harness/constants.py lists them), and times
the layer at the target in fresh processes, as a validator does. Kernels that are faster must pass
the correctness check. Finally the best kernels (B) are compared with the first ones (A) in blocks
of A, B and A again. DIR receives the constants only if the gain exceeds the difference of A and A.
DIR is made from the shipped kernels if it does not exist. Each trial is stored in a file, from
which the next run continues.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from harness.analysis.ab_compare import BLOCKS
from harness.analysis.difference import MIN_BLOCKS
from harness.constants import MissingConstantError, constants_for
from harness.files import write_atomically
from harness.hardware.machine import Environment, EqualGpus, Frozen
from harness.measuring.process import scratch_folder
from harness.measuring.runner import MeasurementError, Options, call, probe
from harness.measuring.sampler import processes_at_once
from harness.search import Gpu, Search, Trial, tune
from harness.terminal import Progress, ends_quietly
from quasar_kernels.arguments import Parser, output_file, positive
from quasar_kernels.contract import OVERLAY, copy_overlay, overlay_digest

MAX_IMPORTS = 8
"""Processes per GPU that import at the same time; they are timed one by one."""
VARIABLES = {"AGENT_ITERATIONS": "20", "TARGET_SEQUENCE_LENGTH": "1000000"}
"""The daemon sets them; other values, such as auto, are replaced by these."""
EX_CONFIG = 78


class Trials(Frozen):
    """The file of trials. Those of other kernels, lengths or machines are not continued."""

    overlay: str  # the first kernels' digest
    length: int
    environment: Environment
    trials: tuple[Trial, ...] = ()


def earlier_trials(path: Path, new: Trials) -> list[Trial]:
    """Return the trials of a file that continues `new`; none of other kernels or machines."""
    try:
        stored = Trials.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return []
    return list(stored.trials) if stored.model_copy(update={"trials": ()}) == new else []


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; the daemon's AGENT_ITERATIONS and target replace the defaults."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    given = {name: os.environ.get(name, "").lstrip("0") for name in VARIABLES}
    trials, target = (text if text.isdecimal() else VARIABLES[name] for name, text in given.items())
    parser.add_argument(
        "--overlay",
        type=Path,
        default=Path("tuned-overlay"),
        help="kernels to improve (tuned-overlay, at first a copy of the shipped ones)",
    )
    parser.add_argument("--target", type=positive, default=target, help=f"in tokens ({target})")
    parser.add_argument("--trials", type=positive, default=trials, help=f"of this run ({trials})")
    parser.add_argument("--seconds", type=float, default=600.0, help="for the trials (600)")
    parser.add_argument("--gpus", type=positive, default=1, help="of the first one's model (1)")
    parser.add_argument("--storage", type=output_file, default="trials.json", help="(trials.json)")
    parser.add_argument(
        "--blocks", type=positive, default=BLOCKS, help=f"of the comparison ({BLOCKS})"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a process (120)")
    arguments = parser.parse_args(argv)
    if arguments.blocks < MIN_BLOCKS:
        parser.error(f"--blocks must be at least {MIN_BLOCKS}")
    return arguments


def find_gpus(count: int, options: Options, folder: Path) -> list[Gpu]:
    """Return up to `count` visible GPUs of the first one's model; `folder` is for their locks."""
    if count == 1:
        return [Gpu(options, folder / "lock")]
    found = call("harness.worker.machine.environment:equal_gpus", options=options)
    return [
        Gpu(replace(options, gpu=uuid), folder / uuid)
        for uuid in EqualGpus.model_validate(found).uuids[:count]
    ]


@ends_quietly
def main(argv: Sequence[str] | None = None) -> int:
    """Tune the kernels by a command line; return the exit status."""
    arguments, progress = parse(argv), Progress()
    options = Options("auto", arguments.timeout)
    try:
        environment = probe(options)
        constants = constants_for(environment.compute_capability or "0")
        if not constants:
            progress.print(
                f"{environment.gpu or 'a CPU'} does not run the tuned kernels: they "
                "need an NVIDIA GPU of compute capability 8.0 or newer."
            )
            return EX_CONFIG
        if not arguments.overlay.exists():
            copy_overlay(OVERLAY, arguments.overlay)
        new = Trials(
            overlay=overlay_digest(root=arguments.overlay),
            length=arguments.target,
            environment=environment,
        )

        def keep(trial: Trial) -> None:
            progress.print(str(trial))
            stored = new.model_copy(update={"trials": tuple(search.trials)})
            write_atomically(arguments.storage, stored.model_dump_json(indent=1) + "\n")

        search = Search(
            overlay=arguments.overlay,
            length=arguments.target,
            constants=constants,
            trials=earlier_trials(arguments.storage, new),
            keep=keep,
        )
        progress.print(f"{environment.gpu}, {arguments.target:,} tokens")
        progress.print(f"{len(search.trials)} earlier trials in {arguments.storage}")
        with scratch_folder("tune-") as folder:
            gpus = find_gpus(arguments.gpus, options, folder)
            best, gain = tune(
                search,
                gpus,
                at_once=max(1, min(MAX_IMPORTS, processes_at_once(environment) // len(gpus))),
                count=arguments.trials,
                seconds=arguments.seconds,
                blocks=arguments.blocks,
            )
    except MissingConstantError as error:
        progress.print(str(error))
        return EX_CONFIG
    except MeasurementError as error:
        progress.print(error.explain())
        return 1
    except OSError as error:
        progress.print(
            f"{error.filename or arguments.storage}: {error.strerror}. Free some space, "
            "or name other files by --overlay and --storage."
        )
        return 1
    if gain is None:
        sys.stdout.write("no gain: no candidate was faster in all its samples\n")
    elif not gain.faster:
        sys.stdout.write(f"no gain: A is the first kernels, B {best}. {gain}\n")
    else:
        sys.stdout.write(f"written to {arguments.overlay}: B is {best}. {gain}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
