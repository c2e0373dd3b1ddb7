"""Decisions of single steps: signatures, measurements, checks before the reveal, verdicts."""

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.measuring.runner import MeasurementError
from harness.measuring.sampler import COOLING_SECONDS
from neurons.miner.context import Context
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from neurons.miner.measuring import new_measurement
from neurons.miner.steps.follow import conclude
from neurons.miner.steps.prepare import _publish
from neurons.runtime.errors import Retry
from neurons.runtime.git.faults import HostRefused, PrivateFork
from neurons.runtime.identity import verify
from neurons.wire.client import ApiClient
from neurons.wire.protocol import Performer, Weight
from tests.neurons.fake_validator_api import REVEAL, Fault
from tests.neurons.live_api import ALICE
from tests.neurons.miner.parts import (
    ENVIRONMENT,
    HOTKEY,
    SETTLED,
    FakeBench,
    Miner,
    Waits,
    draft,
    stop_after,
)

SENT: list[bytes] = []


def answer(request: httpx.Request) -> httpx.Response:
    SENT.append(request.read())
    fields = dict.fromkeys(("miner_hotkey", "fork_url", "commit_hash"), "")
    return httpx.Response(200, json={"submission_id": 1, "is_revealed": True, **fields})


CLIENT = ApiClient("http://127.0.0.1", ALICE, transport=httpx.MockTransport(answer))
FIGURES = st.floats(min_value=1e-9, max_value=1e10, allow_nan=False)


@given(
    speed=FIGURES,
    benchmarks=st.dictionaries(
        st.integers(1, 10**6).map(str),
        st.fixed_dictionaries({"tokens_per_sec": FIGURES, "vram_mb": st.just(0.0) | FIGURES}),
        max_size=12,
    ),
)
def test_the_signature_covers_the_numbers_as_they_are_sent(speed, benchmarks):
    code = {"fork_url": "https://github.com/alice/fork", "commit_hash": "a" * 40}
    claim = {"tokens_per_sec": speed, "vram_mb": 0.0, "benchmarks": benchmarks}
    submission = draft(hotkey=ALICE.hotkey, **code, **claim)
    CLIENT.reveal(1, "s", submission.claim, wire_version=1)
    received = json.loads(SENT.pop())
    text = f"{received['fork_url']}{received['commit_hash']}{received['tokens_per_sec']}"
    text += json.dumps(received["benchmarks"], sort_keys=True)
    assert verify(ALICE.hotkey, text, received["signature"])
    assert (received["tokens_per_sec"], received["benchmarks"]) == (speed, benchmarks)
    assert not verify(ALICE.hotkey, text.replace("a" * 40, "b" * 40), received["signature"])


def test_row_24_disturbed_samples_are_rejected_and_repeated_after_a_pause(context, bench, waits):
    bench.disturbed = 2
    done = run_cycle(context)
    assert done.state is State.VALIDATED
    assert sorted(bench.calls) == [512, 512, 1024, 1024, *SETTLED]  # one round, twice
    assert waits.seconds.count(COOLING_SECONDS) == 1
    assert max(row["tokens_per_sec"] for row in (done.benchmarks or {}).values()) < 1e6


def test_row_24_a_disturbance_that_persists_is_held(context: Context, bench: FakeBench) -> None:
    bench.disturbed = 100
    held = run_cycle(context)
    assert held.state is State.HELD
    assert "30000 MiB" in str(held.reason)


def test_a_machine_that_cannot_measure_is_held(miner: Miner) -> None:
    def probe(*_: Any) -> Any:
        raise MeasurementError("no NVIDIA driver", "crash")

    held = run_cycle(miner(probe=probe))
    assert held.state is State.HELD
    assert "no NVIDIA driver" in str(held.reason)
    assert "DEVICE" in str(held.remedy)


def test_row_23_a_gpu_that_is_missing_for_a_while_is_waited_for(miner: Miner, waits: Any) -> None:
    missing = [MeasurementError("no CUDA device is visible to torch", "crash")] * 4
    missing += [MeasurementError("not done within 120 s", "timeout")]

    def probe(*_: Any) -> Any:
        if missing:
            raise missing.pop()
        return ENVIRONMENT

    assert run_cycle(miner(probe=probe)).state is State.VALIDATED
    assert sum(seconds >= 60 for seconds in waits.seconds) >= 5


def test_a_stop_ends_the_description_of_the_machine(miner: Miner) -> None:
    def probe(options: Any) -> Any:
        context.stop.set()
        assert options.stop.is_set()
        raise MeasurementError("stopped on request", "stopped")

    context = miner(probe=probe)
    assert run_cycle(context).state is State.PUBLISHED


def test_a_stop_ends_the_soak(context: Context) -> None:
    stop = threading.Event()
    stop.set()
    on_gpu = ENVIRONMENT.model_copy(update={"device": "cuda"})
    measurement = new_measurement(
        *(context.settings, context.fork.worktree, on_gpu), "name", None, context.log, stop=stop
    )
    assert measurement.sampler.soak is not None
    with pytest.raises(MeasurementError) as caught:
        measurement.sampler.soak()
    assert caught.value.kind == "stopped"


@pytest.mark.parametrize("change", ["machine", "code"])
def test_measurements_of_another_machine_or_code_are_not_reused(context, bench, kernels, change):
    bench.faults[2048] = [MeasurementError("stopped on request", "stopped")] * 2
    assert run_cycle(context).state is State.PUBLISHED
    if change == "machine":
        bench.environment = ENVIRONMENT.model_copy(update={"torch": "9.9"})
        context.probe = lambda *_: bench.environment
    else:
        kernels.content = "kernel 2\n"
    done = run_cycle(context)
    assert done.state is State.VALIDATED
    assert sorted(bench.calls) == [512, 512, 1024, 1024, 2048, 2048, *SETTLED]
    assert done.content_digest == kernels.digest()


def test_a_fork_other_than_the_committed_one_is_held_without_a_reveal(miner, kernels, fake_api):
    committed = run_cycle(miner(waiter=Waits(stop_after(1))))
    assert committed.state is State.COMMITTED
    before, kernels.url = kernels.url, "https://github.com/zoe/fork"
    held = run_cycle(miner())
    assert (held.id, held.state, fake_api.count(REVEAL)) == (committed.id, State.HELD, 0)
    names = f"The settings name the fork {kernels.url}. The commitment names {before},"
    assert names in str(held.reason)
    assert "GITHUB_USERNAME" in str(held.remedy)


@pytest.mark.parametrize(
    "address", ["https://github.com/zoe/fork", "https://GitHub.com/alice/flash-linear-attention/"]
)
def test_the_committed_address_is_revealed_also_after_a_renaming(miner, kernels, fake_api, address):
    committed = run_cycle(miner(waiter=Waits(stop_after(1))))
    kernels.url = address
    kernels.served = str(committed.fork_url) if "zoe" in address else ""  # the old one redirects
    assert run_cycle(miner()).state is State.VALIDATED
    assert fake_api.body_of(REVEAL)["fork_url"] == committed.fork_url


@pytest.mark.parametrize(("kind", "later"), [(HostRefused, Retry), (PrivateFork, PrivateFork)])
def test_a_refusal_of_a_fork_that_worked_before_is_temporary(context, kernels, kind, later):
    def refuse() -> None:
        raise kind("The remote refused the credentials.", "Check GITHUB_TOKEN.")

    submission = run_cycle(context)
    assert submission.state is State.VALIDATED
    kernels.on_verify = refuse
    with pytest.raises(later):
        _publish(submission, context)


@pytest.mark.parametrize("stored", [True, False])
def test_before_a_second_reveal_the_fork_is_checked_if_the_server_lists_the_commitment(
    miner, kernels, fake_api, stored, monkeypatch
):
    """A reveal that the server has is repeated whatever the settings are now."""
    monkeypatch.setattr("neurons.miner.steps.reveal.is_shown_revealed", lambda *_: False)
    fake_api.faults[REVEAL].append(Fault(502, "gateway", stored=stored))
    stop = stop_after(1)
    waits = Waits(lambda seconds: stop(seconds) if fake_api.count(REVEAL) else None)
    assert run_cycle(miner(waiter=waits)).state is State.FAILED
    kernels.url = "https://github.com/zoe/fork"
    done = run_cycle(miner())
    assert done.state is (State.VALIDATED if stored else State.HELD)
    assert fake_api.count(REVEAL) == 1 + stored


def test_old_reports_are_removed(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neurons.miner.recorder.REPORTS_KEPT", 2)
    for _ in range(4):
        done = run_cycle(context)
    names = {path.name for path in (context.settings.state_dir / "reports").glob("*.json")}
    assert len(names) == 2
    assert Path(str(done.report)).name in names


def performer(**fields: Any) -> Performer:
    row = {"id": 1, "miner_hotkey": HOTKEY, "tokens_per_sec": 1.0, "target_sequence_length": 1}
    return Performer(**row, created_at="2026-01-01T00:00:00", **fields)


PLACE = (2, Weight(uid=0, hotkey=HOTKEY, weight=0.25))


@pytest.mark.parametrize(
    ("row", "place", "early", "state", "rank", "weight"),
    [
        (performer(score=0.0), PLACE, False, State.REJECTED, None, None),
        (performer(score=0.0), PLACE, True, State.PREMATURE, 2, 0.25),
        (performer(score=0.95, rank=2), PLACE, False, State.VALIDATED, 2, 0.25),
        (performer(score=0.95, rank=7), None, False, State.VALIDATED, 7, None),
        (performer(score=0.95), None, False, State.VALIDATED, None, None),
        (performer(rank=7), None, False, State.RANKED, 7, None),
        (None, PLACE, False, State.RANKED, 2, 0.25),
        (None, PLACE, True, State.PREMATURE, 2, 0.25),
        (None, None, True, State.PREMATURE, None, None),
        (None, None, False, State.UNRANKED, None, None),
    ],
)
def test_the_verdict_states_only_what_the_api_shows(row, place, early, state, rank, weight):
    judged_early_at = 1.0 if early else None
    submission = draft(reveal_block=5, queued_at=1.0, judged_early_at=judged_early_at)
    conclusion = conclude(submission, row, place)
    assert (conclusion.state, conclusion.rank, conclusion.weight) == (state, rank, weight)
    assert (conclusion.reason is None) is (state is State.VALIDATED)


@pytest.mark.parametrize(
    ("facts", "rank"),
    [
        ({"reveal_block": 0}, None),  # committed, and never seen in the queue
        ({"reveal_block": 5, "queued_at": 0.0}, 2),
        ({}, 2),  # sent directly
    ],
)
def test_a_rank_counts_if_the_queue_showed_the_revealed_submission(facts, rank):
    found = conclude(draft(**facts), performer(), PLACE)
    state = State.RANKED if rank else State.UNRANKED
    assert (found.state, found.score, found.rank) == (state, None, rank)
    assert ("ranks it 2" in str(found.reason)) is (rank is None)
