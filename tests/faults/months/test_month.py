"""Many cycles in scaled time, and a waiting daemon: memory, descriptors and files stay bounded."""

import json
import os
import re
import sqlite3
import time
from pathlib import Path

import pytest

from tests.neurons.miner.miner_command import idle_environment
from tests.processes import run_python, started, wait_for

CYCLES = 2000 if os.environ.get("QUASAR_NIGHTLY") else 100
REST_SECONDS = 3.0


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_row_33_memory_descriptors_and_files_stay_bounded(tmp_path: Path) -> None:
    done = run_python("-m", "tests.faults.months.month_child", tmp_path / "s", CYCLES, timeout=2900)
    assert done.returncode == 0, done.stderr
    first, last = (json.loads(line) for line in done.stdout.splitlines() if line[0] == "{")
    assert last["rss_kib"] - first["rss_kib"] < 4096, (first, last)
    assert last["descriptors"] == first["descriptors"]
    assert last["secrets"] <= 2  # a signature, and the salt of the live submission
    with sqlite3.connect(tmp_path / "s/journal.sqlite") as journal:
        closed = "SELECT count(*), sum(state = 'VALIDATED') FROM submissions"
        assert journal.execute(closed).fetchone() == (min(CYCLES, 1000),) * 2
        events = journal.execute("SELECT count(*) FROM events").fetchone()[0]
    assert 8 * min(CYCLES, 500) < events <= 5000
    assert len(list((tmp_path / "s/reports").iterdir())) == min(CYCLES, 200)
    logs = list((tmp_path / "s/logs").iterdir())
    assert len(logs) <= 5
    assert sum(file.stat().st_size for file in logs) < 50 * 2**20


def test_a_waiting_miner_needs_little_memory_and_cpu_and_no_torch(tmp_path: Path) -> None:
    """A real miner whose API is down, in its pause between two polls."""
    env = idle_environment(tmp_path)
    log = tmp_path / "log"
    with (
        log.open("w") as out,
        started("-m", "neurons.miner", env=env, stdout=out, stderr=out) as miner,
    ):
        wait_for(lambda: "waiting for a new round" in log.read_text(), child=miner)
        process = Path(f"/proc/{miner.pid}")
        before, since = (cpu_seconds(process), switches(process)), time.monotonic()
        time.sleep(REST_SECONDS)
        rested = time.monotonic() - since
        busy, woken = cpu_seconds(process) - before[0], switches(process) - before[1]
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        mapped = (process / "maps").read_text()
    assert busy <= 0.1 * rested, f"{busy} s of processor time in {rested:.1f} s"
    assert woken <= 20 * rested, f"woke up {woken} times in {rested:.1f} s"
    assert int(status["VmRSS"].split()[0]) <= 120 * 1024, status["VmRSS"]
    assert "/torch/" not in mapped
    assert "/triton/" not in mapped


def cpu_seconds(process: Path) -> float:
    fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def switches(process: Path) -> int:
    """Return the context switches of a process, which do not depend on the machine's speed."""
    texts = [task.read_text() for task in process.glob("task/*/status")]
    return sum(int(n) for text in texts for n in re.findall(r"ctxt_switches:\s+(\d+)", text))
