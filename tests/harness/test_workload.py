"""The lengths to measure on each device, and imports without torch."""

from __future__ import annotations

import pytest

from harness.workload import CPU_LIMIT, LENGTHS, VALIDATOR_LENGTHS, lengths_for
from tests.processes import run_python


@pytest.mark.parametrize(
    ("target", "device", "lengths"),
    [
        (300, "cuda", (300, *VALIDATOR_LENGTHS)),
        (3000, "cuda", (*VALIDATOR_LENGTHS, 3000)),
        (1_000_000, "cuda", LENGTHS),
        (300, "cpu", (300, *VALIDATOR_LENGTHS)),
        (CPU_LIMIT + 1, "cpu", VALIDATOR_LENGTHS),
    ],
)
def test_the_lengths_for_a_target(target: int, device: str, lengths: tuple[int, ...]) -> None:
    assert lengths_for(target, device) == lengths


def test_modules_that_the_daemon_uses_never_import_torch() -> None:
    code = (
        "import sys, harness.__main__, harness.analysis.judge, harness.claim,"
        " harness.measuring.sampler, harness.worker.machine.telemetry;"
        "loaded = {'torch', 'triton', 'fla', 'neurons'} & set(sys.modules);"
        "sys.exit(f'imported {loaded}' if loaded else 0)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
