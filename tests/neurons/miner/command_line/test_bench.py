"""`bench` measures as the miner does, and `status` shows the progress."""

import json
import os
import re
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.measuring.runner import MeasurementError
from harness.report import load_report
from neurons.miner.command_line import bench as program
from neurons.miner.command_line.status import Status, read_status
from neurons.miner.daemon import run_cycle
from neurons.miner.measuring import new_measurement
from neurons.miner.recorder import progress_of
from neurons.runtime.errors import Fault
from neurons.runtime.flags import CommandLineSettings
from neurons.runtime.process import PROGRESS, StateLock
from neurons.wire.rules import league_of
from tests.neurons.miner.parts import (
    ENVIRONMENT,
    SETTLED,
    FakeBench,
    FakeFork,
    make_context,
    make_settings,
)
from tests.processes import started, wait_for
from tests.servers import Handler, Server, dripping, serving

CRASH = MeasurementError("died", "crash")


def bench(
    folder: Path,
    measure: FakeBench,
    monkeypatch: pytest.MonkeyPatch,
    *,
    all_lengths: bool = False,
    **flags: Any,
) -> int:
    """Return the exit status of `bench` with fakes of the fork and the harness."""
    settings = make_settings(folder, **flags)
    monkeypatch.setattr(program, "read_settings", lambda _: (settings, False))
    monkeypatch.setattr(program, "open_fork", lambda _: FakeFork(folder / "fork"))
    monkeypatch.setattr(program, "describe_machine", lambda _: ENVIRONMENT)
    monkeypatch.setattr(
        program, "new_measurement", partial(new_measurement, measure=measure, check=measure.check)
    )
    monkeypatch.setattr(program, "backoff_seconds", lambda *_, **__: 0.0)
    return program.bench(CommandLineSettings(), all_lengths)


@pytest.mark.parametrize(
    "faults",
    [
        {},
        {1024: [CRASH] * 3},
        {1024: [MeasurementError("no memory", "out_of_memory")]},
        {512: [MeasurementError("wrong results", "gate")]},
    ],
)
def test_bench_starts_the_processes_that_the_miner_starts(tmp_path, url, faults, monkeypatch):
    by_bench = FakeBench(faults={length: list(errors) for length, errors in faults.items()})
    try:
        succeeded = bench(tmp_path / "bench", by_bench, monkeypatch) == 0
    except Fault:
        succeeded = False
    by_miner = FakeBench(faults=faults)
    run_cycle(make_context(tmp_path / "mine", url, measure=by_miner))
    assert sorted(by_bench.calls) == sorted(by_miner.calls)
    assert succeeded is (by_bench.calls.count(2048) == len(SETTLED))


def test_all_lengths_are_measured_on_request(tmp_path, monkeypatch):
    measure, flags = FakeBench(), {"claim_runs": 2, "target_sequence_length": 512}
    assert bench(tmp_path, measure, monkeypatch, all_lengths=True, **flags) == 0
    assert sorted(measure.calls) == [*[512] * 5, 1024, 1024, 2048, 2048]
    report = load_report(tmp_path / "reports" / "bench.json")
    assert len(report.measurements) == len(measure.calls)


def shown(number: int, speed: float) -> dict[str, Any]:
    """Return a row of the public statistics."""
    row = {"id": number, "miner_hotkey": "5" + "F" * 47, "created_at": "2026-01-01T00:00:00"}
    return row | {"target_sequence_length": 2048, "tokens_per_sec": speed}


@pytest.mark.parametrize("target", [2048, "auto"])
def test_the_end_shows_the_claim_and_its_place(tmp_path, monkeypatch, capsys, target):
    class Api(Handler):
        def serve(self) -> None:
            queue = [shown(1, 1.0), shown(2, 1e12), {**shown(3, 1.0), "tokens_per_sec": None}]
            lists = {"recent_submissions": queue, "top_performers": [shown(2, 1e12), shown(4, 2.0)]}
            self.send(200, json.dumps({"total_submissions": 4, **lists}).encode())

    server, flags = Server(Api), {"target_sequence_length": target}
    with serving(server):
        assert bench(tmp_path, FakeBench(), monkeypatch, validator_api_url=server.url, **flags) == 0
    *_, claim, score = capsys.readouterr().out.splitlines()
    speed, league = re.findall(r"[0-9,]+", claim)[:2]
    assert claim.startswith("claim: ")
    factor = league_of(int(league.replace(",", "")))[1]
    assert float(score.split()[2].strip(",").replace(",", "")) == pytest.approx(
        factor * int(speed.replace(",", "")), rel=1e-2
    )
    assert score.endswith(f", place 2 among 3 claims that {server.url} lists")
    # without an API, the place is left out
    assert bench(tmp_path, FakeBench(), monkeypatch, validator_api_url=server.url, **flags) == 0
    assert capsys.readouterr().out.splitlines()[-1] == score.partition(", place")[0]


def test_an_endless_reply_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(program, "REPLY_SECONDS", 0.3)
    with dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n{", b" ") as url:
        assert program.listed_scores(url) is None


@dataclass
class WatchedBench(FakeBench):
    """Reads the status whenever a process is started."""

    state_dir: Path = Path()
    statuses: list[tuple[int, Status]] = field(default_factory=list)

    def _measure(self, tree: Path, length: int) -> Any:
        self.statuses.append((length, read_status(self.state_dir)))
        return super()._measure(tree, length)


def test_status_shows_the_progress_of_a_measurement(tmp_path, monkeypatch):
    watched = WatchedBench(state_dir=make_settings(tmp_path).state_dir)
    assert bench(tmp_path, watched, monkeypatch, all_lengths=True) == 0
    (report,) = watched.state_dir.glob("reports/*.json")
    samples = load_report(report).by_length()
    # the last processes run one by one, so the last status shows all earlier speeds
    length, last = watched.statuses[-1]
    speeds = ", ".join(f"{sample.tokens_per_sec:,.0f}" for sample in samples[length][:-1])
    runs = len(samples[length])
    assert f"{length:>9,} tokens, run {runs} of {runs}: {speeds} tokens/s" in last.as_text()
    assert last.as_json()["measuring"]["lengths"][-1]["planned"] == runs
    assert read_status(watched.state_dir).measuring is None


def test_progress_of_a_dead_process_is_not_shown(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from neurons.miner.recorder import ReportRecorder\n"
        "from neurons.runtime.observe import get_logger\n"
        "from neurons.runtime.process import StateLock\n"
        "folder, log = Path(sys.argv[1]), get_logger('test')\n"
        "lock = StateLock(folder)\n"
        "from tests.harness.samples import environment, make_sample\n"
        "recorder = ReportRecorder(folder / 'report.json', None, environment(), log, folder)\n"
        "recorder.planned([make_sample(512)], [512, 512])\n"
        "time.sleep(600)\n"
    )
    with started("-c", code, str(tmp_path)) as process:
        wait_for(lambda: read_status(tmp_path).measuring, child=process)
        assert "512 tokens, run 2 of 3: 1,000 tokens/s" in read_status(tmp_path).as_text()
        assert progress_of(tmp_path) == {"samples": "1 of 3"}
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert (tmp_path / PROGRESS).exists()
    assert read_status(tmp_path).measuring is None
    with StateLock(tmp_path):  # nor as the progress of the next process
        assert read_status(tmp_path).running
        assert read_status(tmp_path).measuring is None
