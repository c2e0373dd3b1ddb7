"""The lengths to measure on each device, and imports without torch."""

from __future__ import annotations

import pytest

from harness.workload import CPU_LIMIT, LENGTHS, VALIDATOR_LENGTHS, lengths_for
from tests.processes import run_python


@pytest.mark.parametrize("target", [300, 2048, 123_456])
def test_a_gpu_measures_the_validators_lengths_and_the_target(target: int) -> None:
    lengths = lengths_for(target, "cuda")
    assert {*VALIDATOR_LENGTHS, target} <= set(lengths)
    assert list(lengths) == sorted(set(lengths))
    assert max(lengths) == max(target, 2048)


def test_the_full_target_measures_every_length() -> None:
    assert lengths_for(1_000_000, "cuda") == LENGTHS


def test_a_cpu_measures_short_lengths_only() -> None:
    assert lengths_for(1_000_000, "cpu") == VALIDATOR_LENGTHS
    assert lengths_for(300, "cpu") == (300, *VALIDATOR_LENGTHS)
    assert max(lengths_for(CPU_LIMIT, "cpu")) == CPU_LIMIT


def test_modules_that_the_daemon_uses_never_import_torch() -> None:
    code = (
        "import sys, harness.__main__, harness.analysis.judge, harness.claim,"
        " harness.measuring.sampler, harness.worker.machine.telemetry;"
        "loaded = {'torch', 'triton', 'fla', 'neurons'} & set(sys.modules);"
        "sys.exit(f'imported {loaded}' if loaded else 0)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
