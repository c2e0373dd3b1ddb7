"""The validator's loop and its process, against a live API and real git repositories."""

import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest

from neurons.runtime import observe
from neurons.runtime.errors import ConfigError, Postponed
from neurons.runtime.identity import create_throwaway
from neurons.runtime.process import Stopped
from neurons.validator.__main__ import main
from neurons.validator.api import ApiFault, ValidatorApi
from neurons.validator.attempts import FIRST_PAUSE, MAX_CRASHES, Attempts
from neurons.validator.logits import Comparison
from neurons.validator.loop import Validator
from neurons.validator.verdict import Verdict, judge, reject
from neurons.wire.protocol import LARGEST, QueuedSubmission, Verification
from quasar_kernels.contract import QUASAR_DIR, REQUIRED_IMPORTS
from tests.neurons.live_api import (
    ALICE,
    BLOCKS,
    VALIDATOR,
    Hotkey,
    LiveApi,
    revelation,
    serve,
    submission,
)
from tests.neurons.validator.samples import Benches, Judge, make_fork, scores
from tests.processes import HANG, is_alive, started, wait_for


def test_revealed_submissions_are_judged_and_commitments_are_not(api, bench):
    answers = Judge(s2=reject("too slow"))
    loop = bench(answers)
    good, bad = api.submit(ALICE, 10.0), api.submit(ALICE, 20.0, target=512)
    committed = api.commit(ALICE)
    loop.run_once()
    assert scores(api) == {good: 1.0, bad: 0.0}
    assert answers.judged == [good, bad]
    api.pass_blocks(BLOCKS)
    loop.run_once()
    assert answers.judged == [good, bad]
    api.ok("/reveal_submission", revelation(ALICE, committed), ALICE)
    loop.run_once()
    assert answers.judged == [good, bad, committed]


@pytest.mark.parametrize("fault", [ZeroDivisionError("ours"), Postponed("no GPU today")])
def test_a_fault_of_the_validator_postpones_the_submission(api, bench, fault):
    observe.configure()  # by default structlog renders all locals, which takes seconds
    answers = Judge(s1=fault)
    loop = bench(answers)
    broken, fine = api.submit(ALICE, 10.0), api.submit(ALICE, 20.0, target=512)
    loop.run_once()
    loop.run_once()
    assert (scores(api), answers.judged) == ({fine: 1.0}, [broken, fine])
    api.clock.now += 60
    younger = api.submit(ALICE, 30.0, target=1024)
    for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE):
        loop.now += pause + 1
        loop.run_once()
    assert answers.judged == [broken, fine, younger, broken, broken, broken]
    answers.answers.clear()
    loop.now += 8 * FIRST_PAUSE
    loop.run_once()
    assert scores(api) == {broken: 1.0, fine: 1.0, younger: 1.0}


def test_weights_are_set_although_the_queue_never_ends(api: LiveApi, bench: Benches) -> None:
    """Otherwise cheap submissions, sent faster than they are judged, would prevent weights."""
    targets = iter(range(512, 2048))
    answers = Judge()
    validator = bench(answers).start()

    class Weights:
        def run_once(self) -> None:
            api.clock.now += 60
            api.submit(ALICE, 10.0, target=next(targets))
            if len(answers.judged) == 3:
                validator._stop.set()

    api.submit(ALICE, 10.0, target=next(targets))
    validator._weights = Weights()  # type: ignore[assignment]
    validator.run_once()
    assert len(answers.judged) == 3


def test_slow_forks_do_not_starve_other_hotkeys(api: LiveApi, bench: Benches) -> None:
    """A hotkey has three slow forks, all older than the honest one."""
    answers, greedy = Judge(), Hotkey("//Greedy")
    loop = bench(answers)
    api.register(greedy)
    slow = [api.submit(greedy, 10.0, target=target) for target in (512, 1024, 2048)]
    api.clock.now += 1
    honest = api.submit(ALICE, 10.0)
    validator, seconds = loop.start(), iter(range(0, 10**6, 1600))
    validator.timer = lambda: next(seconds)
    validator.run_once()
    assert answers.judged == [slow[0], honest, *slow[1:]]
    attempts = loop.start()._attempts
    row = queued(99, greedy.hotkey, f"hotkey {greedy.hotkey}")  # as the API names the client
    assert attempts.queue_key(row)[:2] == (3 * 1600.0,) * 2  # survives a restart
    loop.now += 49 * 3600
    attempts.record_time(row, 1.0)
    assert attempts.queue_key(row)[:2] == (1.0, 1.0)


def queued(number: int, hotkey: str, address: str | None = None) -> QueuedSubmission:
    return QueuedSubmission(
        id=number,
        miner_hotkey=hotkey,
        ip_address=address,
        created_at=f"2026-01-01T00:00:{number:02}",
        target_sequence_length=512,
    )


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path / "attempts", "http://127.0.0.1:1")


@pytest.mark.parametrize("postponed", [False, True])
def test_new_hotkeys_of_one_client_do_not_delay_others(attempts, postponed):
    """Each slow fork comes from a new hotkey, on which no time was spent and which never failed."""
    honest = queued(59, "honest", "198.51.100.7")
    attempts.record_time(queued(1, "honest", "198.51.100.7"), 100.0)
    if postponed:
        attempts.postpone(honest, "the network failed")
    judged = []
    for number in range(2, 58):
        slow = queued(number, f"new {number}", "203.0.113.9")
        judged.append(min((honest, slow), key=attempts.queue_key).miner_hotkey)
        attempts.record_time(slow, 600.0)
    assert judged == ["new 2", *["honest"] * 55]


def test_a_client_pays_while_its_fork_runs_and_for_crashes(attempts, tmp_path):
    """Else new hotkeys of one client get all GPUs at once, or crash the validator for nothing."""
    honest, first, second = (
        queued(number, f"{number}", address)
        for number, address in ((9, "198.51.100.7"), (1, "203.0.113.9"), (2, "203.0.113.9"))
    )
    attempts.record_time(honest, 100.0)
    attempts.begin(first)
    assert min(honest, second, key=attempts.queue_key) is honest
    attempts.close()  # as a crash leaves it
    attempts = Attempts(tmp_path / "attempts", "http://127.0.0.1:1")
    assert min(honest, second, key=attempts.queue_key) is honest


def test_a_verdict_keeps_its_reason_while_it_is_postponed(attempts):
    """Its page showed that the miner's inference server was busy, beside a score of 1."""
    attempts.conclude(row := queued(1, "honest"), verdict := judge(1.0, 1.0))
    attempts.postpone(row, "The miner's inference server answered with status 503.")
    assert attempts.of(row).verdict == verdict


def test_a_clock_that_goes_back_delays_no_submission(tmp_path: Path) -> None:
    now = [1e9]
    attempts = Attempts(tmp_path / "attempts", "http://127.0.0.1:1", lambda: now[0])
    attempts.postpone(row := queued(1, "honest"), "the network failed")
    now[0] -= 30.0
    assert not attempts.is_due(row)
    now[0] -= 86400.0
    assert attempts.is_due(row)


def test_every_fourth_choice_goes_by_age(api: LiveApi, bench: Benches) -> None:
    """An API that shows no addresses: a stream of new hotkeys, and one that has used much time."""
    loop = bench(Judge())
    validator, others = loop.start(), [Hotkey(f"//New{n}") for n in range(7)]
    row = api.submit(ALICE, 10.0)
    validator._attempts.record_time(queued(1, ALICE.hotkey), 9e5)
    for key in others:
        api.clock.now += 1
        api.register(key)
        api.submit(key, 10.0)
    validator.run_once()
    assert loop.judge.judged.index(row) == 3, loop.judge.judged


def test_claims_that_cannot_earn_have_less_time_and_are_postponed(api, bench):
    """Slow forks with a claim of 1 token/s never count as failures, but take the full time."""
    answers, loop = Judge(), bench(Judge())
    for number in range(4):
        api.judged(Hotkey(f"//Leader{number}"), 1000.0 - 100 * number)
    low, high = api.submit(ALICE, 1.0), api.submit(ALICE, 10_000.0, target=512)
    loop.judge = answers
    answers.answers[f"s{low}"] = Postponed("The claim is too low: it had only 150 s.")
    for _ in range(4):
        loop.run_once()
        loop.now += 3600
    given = list(zip(answers.judged, answers.shares, strict=True))
    assert [share for row, share in given if row == high] == [1.0]
    assert [share for row, share in given if row == low] == [0.25, 0.5, 1.0, 1.0]
    assert api.post("/submit_kernel", submission(ALICE, 2.0), ALICE).status_code == 200
    assert low not in scores(api)


@pytest.mark.parametrize(("leaders", "claim", "share"), [(3, 1.0, 1.0), (4, 700.0, 0.25)])
def test_a_claim_that_may_earn_has_the_full_time(api, bench, leaders, claim, share):
    """Fewer than four hotkeys rank, or the claim must exceed that of the fourth by 3%."""
    for number in range(leaders):
        api.judged(Hotkey(f"//Leader{number}"), 1000.0 - 100 * number)
    loop = bench(Judge())
    api.submit(ALICE, claim)
    api.clock.now += 60
    api.submit(ALICE, 722.0, target=512)
    loop.run_once()
    assert loop.judge.shares == [share, 1.0]


def test_a_large_queue_is_not_read_before_each_submission(api, bench, monkeypatch):
    loop, keys = bench(Judge()), [Hotkey(f"//Miner{number}") for number in range(20)]
    monkeypatch.setattr("neurons.validator.loop.LARGE_QUEUE", 5)
    for key in keys:
        api.register(key)
        api.submit(key, 10.0)
    validator, reads = loop.start(), []
    queue = validator._api.queue
    monkeypatch.setattr(validator._api, "queue", lambda: reads.append(1) or queue())
    times = iter(range(10**6))
    validator.timer = lambda: next(times)

    class Weights:
        def run_once(self) -> None:  # after each submission
            if len(loop.judge.judged) == 1:
                api.mark(2, 1.0)  # another validator judges the next one

    validator._weights = Weights()
    validator.run_once()
    assert loop.judge.judged == [1, *range(3, 21)]
    assert len(reads) <= 4, "at the start, after the other verdict, and after each 60 s"


@pytest.mark.parametrize("answered", [True, False])
def test_only_compared_logits_count_as_a_failure(api, bench, answered):
    validator = bench(Judge()).start()

    class Logits:
        def verify(self, submission: QueuedSubmission, **_: object) -> Comparison:
            failed = Verification(submission_id=submission.id, verified=False, reason="differ")
            return Comparison(failed, answered=answered)

    validator._logits = Logits()
    for target in range(512, 517):
        api.submit(ALICE, 10.0, target=target)
    validator.run_once()
    status = api.post("/submit_kernel", submission(ALICE, 1.0), ALICE).status_code
    assert status == (403 if answered else 200)


def test_faults_before_the_verdict_do_not_make_a_busy_inference_server_fail(api, bench):
    loop, finals = bench(Judge(s1=Postponed("no GPU today"))), []

    class Busy:
        def verify(self, submission: QueuedSubmission, *, final: bool) -> Comparison:
            finals.append(final)
            raise Postponed("The miner's inference server answered with status 503.")

    api.submit(ALICE, 10.0)
    for poll in range(14):
        if poll == 7:
            loop.judge.answers.clear()
        validator = loop.start()
        validator._logits = Busy()
        validator.run_once()
        loop.now += 3601
    assert finals == [False] * 6 + [True]


def test_a_miner_pays_for_the_time_that_its_inference_server_takes(api, bench):
    """Every evaluation waits for the comparison, so slow servers must not be free."""
    validator, now = bench(Judge()).start(), [0.0]

    class Slow:
        def verify(self, submission: QueuedSubmission, **_: object) -> Comparison:
            now[0] += 500.0
            raise Postponed("The miner's inference server gave no complete reply.")

    validator._logits, validator.timer = Slow(), lambda: now[0]
    api.submit(ALICE, 10.0)
    validator.run_once()
    row = queued(99, ALICE.hotkey, f"hotkey {ALICE.hotkey}")
    assert validator._attempts.queue_key(row)[:2] == (500.0, 500.0)


def test_the_fifth_failure_bans_the_client_and_drops_its_queue(api, bench):
    loop = bench(Judge("", {f"s{n}": reject("no") for n in range(1, 9)}))
    for target in range(512, 520):
        api.submit(ALICE, 10.0, target=target)
    loop.run_once()
    assert loop.judge.judged == [1, 2, 3, 4, 5]
    with pytest.raises(AssertionError, match="IP address banned"):
        api.submit(ALICE, 1.0)


def test_a_verdict_with_figures_beyond_the_wires_limit_is_written(api, bench):
    """A tiny claim gives a huge score, and a fork reports its own memory."""
    huge = {"512": {"tokens_per_sec": 7.0, "vram_mb": 1e300}}
    loop = bench(Judge(s1=replace(judge(1e-300, 1e100), measured=huge)))
    row = api.submit(ALICE, 10.0)
    loop.run_once()
    assert scores(api) == {row: LARGEST}


class Killed(BaseException):
    """Acts as SIGKILL does: nothing is written after it."""


def test_a_submission_is_set_aside_after_repeated_crashes(api, bench):
    answers = Judge(s1=Killed())
    loop = bench(answers)
    deadly, fine = api.submit(ALICE, 10.0), api.submit(ALICE, 20.0, target=512)
    for _ in range(MAX_CRASHES):
        with pytest.raises(Killed):
            loop.run_once()
    loop.run_once()
    # The other one came before its second attempt.
    assert answers.judged == [deadly, fine, deadly, deadly]
    assert scores(api) == {fine: 1.0}
    attempts = Attempts(loop.file, api.url)
    assert attempts.reset_crashes() == 1
    answers.answers.clear()
    loop.run_once()
    assert scores(api) == {fine: 1.0, deadly: 1.0}


def test_an_unwritten_verdict_is_kept_and_written_later(api, monkeypatch, bench):
    timed = {"512": {"tokens_per_sec": 7.0}, "100000": {"tokens_per_sec": 95.0, "vram_mb": 1.5}}
    verdict = replace(judge(100.0, 95.0), measured=timed, device="NVIDIA H200")
    answers = Judge(s1=verdict)
    loop = bench(answers)
    row = api.submit(ALICE, 10.0)
    real, calls = ValidatorApi.mark, []

    def lost(self: ValidatorApi, submission_id: int, *values: Any) -> None:
        calls.append(values)
        if len(calls) == 1:
            raise ApiFault("the API went away")
        if len(calls) == 2:
            raise Killed
        real(self, submission_id, *values)

    monkeypatch.setattr(ValidatorApi, "mark", lost)
    loop.run_once()
    assert scores(api) == {}
    with pytest.raises(Killed):
        loop.run_once()
    loop.run_once()
    assert (scores(api), answers.judged) == ({row: 0.95}, [row])
    assert calls == [(0.95, verdict.reason, timed, "NVIDIA H200")] * 3


def test_a_verdict_whose_failure_is_not_counted_stays_written(api, monkeypatch, bench, capsys):
    def lost(self: ValidatorApi, address: str) -> None:
        raise ApiFault("the API went away")

    monkeypatch.setattr(ValidatorApi, "record_failure", lost)
    loop = bench(Judge(s1=reject("the imports are wrong")))
    row = api.submit(ALICE, 10.0)
    loop.run_once()
    loop.run_once()
    assert (scores(api), loop.judge.judged) == ({row: 0.0}, [row])
    log = "".join(capsys.readouterr())
    assert "failure not counted" in log
    assert "verdict not written" not in log


def test_the_attempts_of_an_earlier_version_are_read(api, tmp_path, bench):
    row = api.submit(ALICE, 10.0)
    file = tmp_path / "attempts.sqlite"
    (queued,) = ValidatorApi(api.url, VALIDATOR).queue()
    with closing(Attempts(file, api.url)) as attempts:
        attempts.conclude(queued, judge(100.0, 95.0))
    with closing(sqlite3.connect(file)) as database:
        for added in ("measured", "device"):
            database.execute(f"ALTER TABLE attempts DROP COLUMN {added}")
    loop = bench(Judge(s1=AssertionError("its verdict is known")))
    loop.run_once()
    assert scores(api) == {row: 0.95}


def test_a_damaged_file_of_attempts_is_reported_with_its_remedy_and_kept(tmp_path: Path) -> None:
    file, content = tmp_path / "attempts.sqlite", b"not a database, but long enough" * 50
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"attempts {file} is damaged.*Move it away"):
        Attempts(file, "http://127.0.0.1:1")
    assert file.read_bytes() == content
    with pytest.raises(ConfigError, match="STATE_DIR"):
        Attempts(file / "attempts.sqlite", "http://127.0.0.1:1")


def test_a_stop_leaves_the_rest_in_the_queue(api: LiveApi, bench: Benches) -> None:
    answers = Judge(s1=Stopped("stop requested"))
    loop = bench(answers)
    for target in (512, 1024):
        api.submit(ALICE, 10.0, target=target)
    for _ in range(MAX_CRASHES + 1):  # stops do not count as crashes
        loop.run_once()
    assert (scores(api), set(answers.judged), len(answers.judged)) == ({}, {1}, MAX_CRASHES + 1)


class TwoPauses(threading.Event):
    """A stop that is set during the second wait."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        if self.waits == 2:
            self.set()
        return self.is_set()


def test_the_loop_survives_an_unreachable_api(tmp_path, monkeypatch):
    monkeypatch.setattr("neurons.validator.api.PAUSE_SECONDS", 0.01)
    with serve(tmp_path) as api:
        url = api.url
    stop = TwoPauses()
    client = ValidatorApi(url, VALIDATOR, stop=stop)
    loop = Validator(client, [Judge()], None, stop)  # type: ignore[list-item, arg-type]
    loop.run_forever(0.05)
    assert stop.waits == 2


def test_the_loop_waits_for_space_on_the_disk(api, bench):
    row = api.submit(ALICE, 10.0)
    validator = bench(Judge()).start()
    database = validator._attempts._database

    class Pause(TwoPauses):
        def wait(self, timeout: float | None = None) -> bool:
            database.set_progress_handler(None, 0)
            return super().wait(timeout)

    database.set_progress_handler(lambda: 1, 1)  # each statement is an OperationalError
    validator._stop = Pause()
    validator.run_forever(0.05)
    assert scores(api) == {row: 1.0}


def test_an_idle_validator_logs_a_line_every_hour(api, bench, capsys):
    polls = [  # hour, submissions, log lines
        (0.0, 0, 1),
        (0.5, 0, 0),
        (0.9, 0, 0),
        (1.1, 0, 1),
        (1.5, 0, 0),
        (1.6, 1, 1),  # after its verdict
        (2.5, 0, 0),
        (2.7, 0, 1),
    ]
    lines: list[int] = []

    def prepare() -> None:
        hour, submissions, _ = polls[len(lines)]
        validator.timer = lambda: 3600 * hour
        for _ in range(submissions):
            api.submit(ALICE, 10.0)

    class Pause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            lines.append("".join(capsys.readouterr()).count("no submission is due"))
            if len(lines) == len(polls):
                self.set()
            else:
                prepare()
            return self.is_set()

    validator = bench(Judge()).start()
    validator._stop = Pause()
    prepare()
    validator.run_forever(0.05)
    assert lines == [expected for _, _, expected in polls]
    assert len(scores(api)) == 1


class Home:
    """A validator on this machine: its wallet and its environment."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.identity = create_throwaway(folder / "wallets")
        self.set(
            ENV_FILE=os.devnull,
            STATE_DIR=str(folder / "state"),
            WALLET_PATH=str(folder / "wallets"),
            WALLET_VALIDATOR_NAME="throwaway",
            POLLING_INTERVAL="0.2",
            DEVICE="cpu",
            SANDBOX="off",
            ALLOW_FILE_FORKS="true",
            SUBTENSOR_NETWORK="offline",
        )

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

    @contextmanager
    def serve(self) -> Iterator[LiveApi]:
        """Serve an API that accepts this validator's verdicts, and register a miner."""
        with serve(self.folder, validator_hotkeys=frozenset({self.identity.hotkey})) as api:
            self.set(VALIDATOR_API_URL=api.url)
            api.register(ALICE)
            yield api


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, monkeypatch)


HANG_AT_IMPORT = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({note!r}, 'w').write(str(os.getpid()))
time.sleep(600)
"""


def test_sigterm_ends_the_process_and_its_worker(home: Home, tmp_path: Path) -> None:
    note, fork = tmp_path / "worker", make_fork(tmp_path / "fork")
    chunk = HANG_AT_IMPORT.format(note=str(note)) + "\n".join(REQUIRED_IMPORTS) + "\n"
    packages = ("fla/__init__.py", "fla/layers/__init__.py", "fla/ops/__init__.py")
    made = fork.commit({**dict.fromkeys(packages, ""), f"{QUASAR_DIR}/chunk.py": chunk})
    with home.serve() as api:
        row = api.submit(ALICE, 1.0, target=512, fork=fork.url, commit=made)
        with started("-m", "neurons.validator", stdout=PIPE, stderr=STDOUT) as process:
            wait_for(lambda: note.exists() and note.read_text(), child=process)
            process.send_signal(signal.SIGTERM)
            log, _ = process.communicate(timeout=HANG)
        assert process.returncode == 0, log
        wait_for(lambda: not is_alive(int(note.read_text())))  # init may not have reaped it yet
        queue = api.get("/get_submission_stats")["recent_submissions"]
        assert [entry["id"] for entry in queue] == [row]


def test_new_round_ends_the_running_round(home, capsys):
    with home.serve() as api:
        winner = api.submit(ALICE, 10.0)
        ValidatorApi(api.url, home.identity).mark(winner, 1.0)
        assert main(["--new-round", "5"]) == 0
        assert "round opened  round=2 hours=5" in capsys.readouterr().out
        current = api.get("/get_current_round")
        assert current["baseline_submission_id"] == winner
        assert current["time_remaining_seconds"] == 5 * 3600
        assert [row["weight"] for row in api.get("/get_weights")["weights"]] == [0.6]


def test_an_organisers_calls_from_the_command_line(home, capsys):
    client = f"hotkey {ALICE.hotkey}"
    with home.serve() as api:
        cheat = api.submit(ALICE, 10.0)
        assert main(["--withdraw", str(cheat), "--reason", "a copy"]) == 0
        assert f'withdrawn  submission={cheat} reason="a copy"' in capsys.readouterr().out
        assert api.get(f"/queue_place/{cheat}")["place"] is None
        for _ in range(5):
            ValidatorApi(api.url, home.identity).record_failure(client)
        assert main(["--lift-ban", ALICE.hotkey]) == 0  # a bare hotkey stands for its key
        assert api.submit(ALICE, 11.0) > cheat
        assert main(["--lift-ban", "203.0.113.9"]) == 1
        assert "No ban and no failures of 203.0.113.9" in capsys.readouterr().err
        assert main(["--withdraw", "99"]) == 1
        assert "Submission not found" in capsys.readouterr().err


def test_a_verdict_after_a_withdrawal_is_dropped(api, bench, capsys, monkeypatch):
    """The organiser withdraws the submission while it is judged."""
    observe.configure()
    loop, row = bench(Judge(s1=reject("the imports are wrong"))), api.submit(ALICE, 10.0)
    evaluate = loop.judge.evaluate

    def withdrawn(*arguments: Any) -> Verdict:
        api.judge("/withdraw_submission", {"submission_id": row})
        return evaluate(*arguments)

    monkeypatch.setattr(loop.judge, "evaluate", withdrawn)
    monkeypatch.setattr(ValidatorApi, "record_failure", None)  # nothing is counted twice
    loop.run_once()
    loop.run_once()
    assert (scores(api), loop.judge.judged) == ({row: 0.0}, [row])
    assert "verdict not counted" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WALLET_VALIDATOR_NAME": "nobody"}, "(WALLET_VALIDATOR_NAME=nobody, "),
        ({"VALIDATOR_API_URL": ""}, "VALIDATOR_API_URL"),
        ({"DEVICE": "tpu"}, "DEVICE='tpu'"),
        ({"SANDBOX": "required", "PATH": "/nonexistent"}, "No sandbox for forks works"),
    ],
)
def test_a_configuration_error_has_status_78(home, capsys, variables, words):
    home.set(**{"VALIDATOR_API_URL": "http://127.0.0.1:1", **variables})
    assert main(["--once"]) == 78
    assert words in capsys.readouterr().err


def test_an_unreachable_api_ends_one_pass_with_status_1(home, capsys, monkeypatch):
    monkeypatch.setattr("neurons.validator.__main__.check_imports", lambda *_: None)
    monkeypatch.setattr("neurons.validator.api.PAUSE_SECONDS", 0.01)
    home.set(VALIDATOR_API_URL="http://127.0.0.1:1")
    assert main(["--once"]) == 1
    assert "Traceback" not in capsys.readouterr().err
