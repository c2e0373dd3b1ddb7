"""A validator with several GPUs, which judges submissions at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import structlog

from neurons.runtime.errors import ConfigError
from neurons.validator.api import ApiFault, ValidatorApi
from neurons.validator.attempts import Attempts
from neurons.validator.evaluate import FaultyMachine
from neurons.validator.verdict import Verdict
from neurons.wire.protocol import QueuedSubmission
from tests.neurons.live_api import ALICE, BOB, VALIDATOR, LiveApi
from tests.neurons.validator.samples import Benches, Judge, scores
from tests.processes import HANG, wait_for


class Together(Judge):
    """Ends an evaluation when all parties of a barrier are evaluating."""

    def __init__(self, gpu: str, barrier: threading.Barrier) -> None:
        super().__init__(gpu)
        self.barrier = barrier

    def evaluate(self, submission: QueuedSubmission, share: float = 1.0) -> Verdict:
        self.barrier.wait(HANG)
        return super().evaluate(submission, share)


class Waiting(Judge):
    """Ends an evaluation when the event is set."""

    def __init__(self, gpu: str = "") -> None:
        super().__init__(gpu)
        self.began, self.end = threading.Event(), threading.Event()

    def evaluate(self, submission: QueuedSubmission, share: float = 1.0) -> Verdict:
        self.began.set()
        assert self.end.wait(HANG)
        return super().evaluate(submission, share)


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neurons.validator.loop.POLL_SECONDS", 0.02)


def test_submissions_of_one_hotkey_are_judged_one_after_another(api, bench, quick_polls):
    """Another hotkey's submission, which arrives meanwhile, is judged at once on another GPU."""
    first = api.submit(ALICE, 10.0)
    second = api.submit(ALICE, 10.0, target=512)
    slow, idle = Waiting("0"), Judge("1")
    with structlog.testing.capture_logs() as lines, ThreadPoolExecutor() as pool:
        judged = pool.submit(bench(slow, idle).run_once)
        assert slow.began.wait(HANG)
        api.register(BOB)
        other = api.submit(BOB, 10.0)
        wait_for(lambda: idle.judged)
        assert idle.judged == [other]
        slow.end.set()
        judged.result(HANG)
    assert sorted(slow.judged + idle.judged) == [first, second, other]
    judging = [(line["submission"], line["gpu"]) for line in lines if line["event"] == "judging"]
    assert judging[:2] == [(first, "0"), (other, "1")]


def test_a_submission_is_judged_alone_after_a_crash(api, bench, quick_polls):
    """Both were running at the crash; a second crash would then count for one of them only."""
    api.register(BOB)
    rows = api.submit(ALICE, 10.0), api.submit(BOB, 20.0)
    loop = bench(Judge("0"), Judge("1"))
    for queued in ValidatorApi(api.url, VALIDATOR).queue():
        with closing(Attempts(loop.file, api.url)) as attempts:
            attempts.begin(queued)  # the next start counts a crash
    barrier = threading.Barrier(2)
    judges = Together("0", barrier), Together("1", barrier)
    with ThreadPoolExecutor() as pool:
        judged = pool.submit(bench(*judges).run_once)
        for count in (1, 2):
            wait_for(lambda: barrier.n_waiting)
            assert len(judges[0].judged + judges[1].judged) == count - 1
            barrier.wait(HANG)  # this test is the second party, because the other GPU is idle
        judged.result(HANG)
    assert scores(api) == dict.fromkeys(rows, 1.0)


def test_a_gpu_that_fails_its_control_run_gets_no_more_submissions(api, bench):
    """It would postpone submissions faster than a sound GPU judges. The last GPU is kept."""
    keys = [ALICE, BOB]
    api.register(BOB)
    rows = [api.submit(key, 10.0, target=target) for target in (512, 1024) for key in keys]
    faulty = {f"s{row}": FaultyMachine("no GPU") for row in rows}
    broken, sound = Judge("0", faulty), Waiting("1")
    with ThreadPoolExecutor() as pool:
        judged = pool.submit(bench(broken, sound).run_once)
        assert sound.began.wait(HANG)
        wait_for(lambda: broken.judged)
        sound.end.set()
        judged.result(HANG)
    assert (len(broken.judged), sorted(sound.judged + broken.judged)) == (1, rows)
    alone = Judge("", faulty)
    later = bench(alone)
    later.now += 3600
    later.run_once()
    assert alone.judged == broken.judged


@pytest.mark.parametrize("error", [ConfigError("not its validator"), KeyboardInterrupt()])
def test_an_error_stops_other_evaluations_and_keeps_their_verdicts(api, bench, monkeypatch, error):
    api.register(BOB)
    failing, other = api.submit(ALICE, 10.0), api.submit(BOB, 20.0)
    slow = Waiting("1")
    loop = bench(Judge("0"), slow)
    validator = loop.start()

    def refused(*_: object) -> None:
        slow.end.set()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ValidatorApi, "mark", refused)
        with pytest.raises(type(error)):
            validator.run_once()
    assert validator._stop.is_set()
    validator._attempts.close()
    again = bench(Judge(), Judge())
    again.run_once()
    assert scores(api) == {failing: 1.0, other: 1.0}
    assert other not in again.judge.judged  # its verdict was kept


def test_an_unreachable_api_ends_no_evaluation(api, bench, monkeypatch, quick_polls):
    row = api.submit(ALICE, 10.0)
    slow, real, calls = Waiting("0"), ValidatorApi.queue, []

    def queue(self: ValidatorApi) -> list[QueuedSubmission]:
        calls.append(1)
        if 1 < len(calls) < 5:
            raise ApiFault("the API went away")
        if len(calls) == 5:
            slow.end.set()
        return real(self)

    monkeypatch.setattr(ValidatorApi, "queue", queue)
    bench(slow, Judge("1")).run_once()
    assert scores(api) == {row: 1.0}


def test_no_target_is_timed_while_logits_are_compared(api: LiveApi, bench: Benches) -> None:
    """The validator's inference server uses cores, and perhaps the same GPU."""
    api.submit(ALICE, 10.0)
    judge = Judge("0")
    timed = []

    def time_a_target() -> None:
        with judge.lock.alone():
            timed.append(True)

    timing = threading.Thread(target=time_a_target)

    class Logits:
        def verify(self, *_: object, **__: object) -> None:
            timing.start()
            wait_for(lambda: judge.lock._waiting)
            assert not timed

    validator = bench(judge).start()
    validator._logits = Logits()  # type: ignore[assignment]
    validator.run_once()
    timing.join()
    assert timed
