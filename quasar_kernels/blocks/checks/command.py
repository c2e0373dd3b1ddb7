"""`python -m harness gates`: checks of a model of blocks before its training."""

from __future__ import annotations

import argparse
import importlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quasar_kernels.arguments import Parser, positive
from quasar_kernels.blocks import MIXERS
from quasar_kernels.blocks.checks.findings import Finding, ModelChecks, Verdict, worst

if TYPE_CHECKING:
    import torch
    from torch import nn

SMALL = {"vocabulary": 64, "width": 32, "heads": 2, "layers": 1, "state": 16}
"""The sizes of the model that is built from a list of branches."""


class ModelError(ValueError):
    """--model does not name a model; the message lists the valid names."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m harness gates",
        description="Check a model: kernels (G0), forward pass (G1), initial entropy (G2), "
        "a mini-training (G3), and the balance of its branches (G4).",
        epilog="Exit status: 0 if no check fails, 1 if one fails, 2 for a usage error.",
    )
    parser.add_argument("--model", default="+".join(MIXERS),
                        help="branches of a small model, joined by + (default: all), or "
                        "MODULE:FUNCTION that returns your model")  # fmt: skip
    parser.add_argument("--fusion", default="gains",
                        help="how branches are combined: gains, gated or mean (gains)")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=100,
                        help="steps of the mini-training (100)")  # fmt: skip
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--json", type=Path, help="write the findings to this file")
    return parser


def build(name: str, fusion: str = "gains") -> nn.Module:
    """Return the named model; its initial weights are the same at each call.

    Raises:
        ModelError: the name is neither a list of branches nor a function that returns a model.
    """
    import torch
    from torch import nn

    from quasar_kernels.blocks.language import LanguageModel, Sizes

    torch.manual_seed(0)
    if ":" not in name:
        try:
            sizes: dict[str, Any] = {**SMALL, "mixers": tuple(name.split("+")), "fusion": fusion}
            return LanguageModel(Sizes(**sizes))
        except ValueError as error:
            raise ModelError(f"--model {name}: {error}, or give MODULE:FUNCTION") from None
    module, function = name.split(":", 1)
    try:
        model = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ModelError(f"--model {name}: {error}; name a function without arguments") from error
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "vocabulary", None), int):
        raise ModelError(
            f"--model {name} returned {type(model).__name__}; it must return a torch module with "
            "the attribute `vocabulary`, the number of its tokens"
        )
    return model


def run_checks(name: str, model: nn.Module, steps: int, device: torch.device) -> ModelChecks:
    """Check a model, and print a line for each finding."""
    import torch

    from quasar_kernels.blocks.checks.stages import check_model

    findings: list[Finding] = []
    with still_at_work(findings):
        for finding in check_model(model.to(device), steps, device):
            findings.append(finding)
            words = f"{finding.gate}  {finding.verdict.value}  {finding.what}: {finding.told}"
            sys.stdout.write(f"{words}\n")
            sys.stdout.flush()
    return ModelChecks(
        model=name, device=device.type, torch=torch.__version__, steps=steps,
        verdict=worst(findings), findings=tuple(findings),
    )  # fmt: skip


@contextmanager
def still_at_work(findings: Sequence[object], seconds: float = 30.0) -> Iterator[None]:
    """Report every `seconds` on stderr that the checks continue, and how many are done."""
    ended, began = threading.Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(seconds):
            passed = time.monotonic() - began
            sys.stderr.write(f"still at work after {passed:.0f} s; checks done: {len(findings)}\n")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    import torch  # after `--help`: it takes seconds

    from quasar_kernels.blocks.fusion import FUSIONS

    if arguments.fusion not in FUSIONS:
        parser.error(f"--fusion {arguments.fusion}: it must be one of {', '.join(FUSIONS)}")
    on_gpu = torch.cuda.is_available()
    if arguments.device == "cuda" and not on_gpu:
        parser.error("--device cuda: torch finds no GPU here")
    kind = arguments.device if arguments.device != "auto" else "cuda" if on_gpu else "cpu"
    try:
        model = build(arguments.model, arguments.fusion)
    except ModelError as error:
        parser.error(str(error))
    result = run_checks(arguments.model, model, arguments.steps, torch.device(kind))
    sys.stdout.write(f"{result.verdict.value}: {result.model} on {result.device}\n")
    if arguments.json:
        arguments.json.write_text(result.model_dump_json(indent=2) + "\n")
    return 1 if result.verdict is Verdict.FAIL else 0
