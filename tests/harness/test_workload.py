"""The validator's constants, and which lengths are measured where."""

from __future__ import annotations

import pytest

from harness.workload import CPU_LIMIT, LENGTHS, VALIDATOR_LENGTHS, WORKLOAD, lengths_for
from tests.processes import run_python


def test_constants_are_those_of_the_validators_script() -> None:
    # Source: the specification of the layer, "what a validator times".
    assert WORKLOAD.layer_arguments() == {
        "hidden_size": 512,
        "head_dim": 64,
        "num_heads": 8,
        "mode": "chunk",
        "use_short_conv": True,
    }
    assert (WORKLOAD.warmup_calls, WORKLOAD.timed_calls, WORKLOAD.timeout_seconds) == (3, 10, 300)


@pytest.mark.parametrize("target", [1, 300, 2048, 100_000, 123_456, 1_000_000])
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


@pytest.mark.parametrize(("target", "device"), [(0, "cuda"), (-5, "cpu"), (512, "tpu")])
def test_bad_input_is_named(target: int, device: str) -> None:
    with pytest.raises(ValueError, match=str(target) if target < 1 else device):
        lengths_for(target, device)


def test_the_daemons_side_of_the_harness_never_imports_torch() -> None:
    code = (
        "import sys, harness.__main__, harness.analysis.judge, harness.claim,"
        " harness.measuring.sampler, harness.worker.machine.telemetry;"
        "loaded = {'torch', 'triton', 'fla', 'neurons'} & set(sys.modules);"
        "sys.exit(f'imported {loaded}' if loaded else 0)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
