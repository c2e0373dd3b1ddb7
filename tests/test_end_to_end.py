"""A trial from end to end: a miner without a .env, with real workers, API and validator."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.report import load_report
from harness.sample import accepted
from neurons.miner.command_line.status import JOURNAL
from neurons.miner.cycle import State, Submission
from neurons.miner.journal import Journal
from tests import PROJECT
from tests.processes import HANG, children_of, wait_for
from tests.repositories import run_git
from tests.small_fla import install_small_fla

pytestmark = pytest.mark.slow

CANARY = "ghp_canary4af0c1e7b25d4af0c1e7b25d4af0c1e7"

TWO_SAMPLES = """
import sys
from neurons.miner import __main__, measuring
measuring.MAX_CPU_RUNS = 2
sys.exit(__main__.main(sys.argv[1:]))
"""
"""`python -m neurons.miner` with two samples of its target; by default it takes five on a CPU."""
TARGET = 512


@dataclass
class Miner:
    """Runs the miner's command line with one state folder."""

    state: Path
    temporary: Path  # TMPDIR, by which all descendants are recognised
    path: str  # PYTHONPATH with the small fla

    @property
    def folder(self) -> Path:
        return self.state / "embedded"

    @property
    def environment(self) -> dict[str, str]:
        folders = dict.fromkeys(("HOME", "TMPDIR"), str(self.temporary))
        settings = {"ENV_FILE": "/dev/null", "GITHUB_TOKEN": CANARY, "DEVICE": "cpu"}
        settings |= {"TARGET_SEQUENCE_LENGTH": str(TARGET), "CLAIM_RUNS": "1"}
        settings["BENCH_TIMEOUT_SECONDS"] = "900"  # a busy machine measures slowly
        return {"PATH": os.environ["PATH"], "PYTHONPATH": self.path, **folders, **settings}

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", TWO_SAMPLES, *arguments, "--state-dir", str(self.state)],
            cwd=PROJECT,
            env={**self.environment, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environ)
        out, err = process.communicate(timeout=HANG)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def latest(self) -> Submission | None:
        path = self.folder / JOURNAL
        if not path.is_file():
            return None
        with Journal(path, copy=True) as journal:  # the miner may be creating it
            return next(iter(journal.latest()), None)

    def latest_state(self) -> State | None:
        latest = self.latest()
        return latest.state if latest else None

    def descendants(self) -> list[str]:
        """Return the command lines of running processes that this miner started."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if str(self.temporary).encode() in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found += [line] if line else []
            except OSError:
                continue
        return found

    def secret_holders(self, salt: str) -> list[str]:
        """Return the logs and reports with the salt, and all files with the token."""
        written = [*self.state.rglob("*.log*"), *self.state.rglob("reports/*")]
        assert len(written) >= 4
        holders = [path for path in written if salt.encode() in path.read_bytes()]
        files = (path for path in self.state.rglob("*") if path.is_file())
        return [
            str(p) for p in (*holders, *(f for f in files if CANARY.encode() in f.read_bytes()))
        ]


@pytest.fixture(scope="module")
def miner(tmp_path_factory: pytest.TempPathFactory) -> Miner:
    root = tmp_path_factory.mktemp("end-to-end")
    (root / "tmp").mkdir()
    return Miner(root / "state", root / "tmp", install_small_fla(root / "fla"))


@dataclass(frozen=True)
class Life:
    """A submission whose miner was stopped, started, killed, and started again."""

    stopped: tuple[int, str]  # exit status and standard error after SIGTERM during the measurement
    killed: Submission  # at the kill between commit and reveal
    statuses: tuple[dict[str, Any], dict[str, Any]]  # `status --json` before and after the kill
    finished: subprocess.CompletedProcess[str]  # the miner after the kill


@pytest.fixture(scope="module")
def life(miner: Miner) -> Life:
    # with blocks of an hour, the reveal cannot happen before the kill
    slow = {"BLOCKS_UNTIL_REVEAL": "2", "BLOCK_TIME_SECONDS": "3600"}
    process = miner.start("run", **slow)

    def measuring() -> bool:
        # the validator also starts workers, before the miner publishes
        return miner.latest_state() is State.PUBLISHED and any(
            "harness.worker" in one for one in children_of(process.pid)
        )

    wait_for(measuring, child=process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANG)
    stopped = process.returncode, err
    wait_for(lambda: not miner.descendants())
    assert miner.latest_state() is State.PUBLISHED  # the next start continues from there
    process = miner.start("once", **slow)
    wait_for(lambda: miner.latest_state() is State.COMMITTED, child=process)
    during = json.loads(miner.run("status", "--json").stdout)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not miner.descendants())
    killed = miner.latest()
    assert killed is not None
    after = json.loads(miner.run("status", "--json").stdout)
    # with the default, short blocks, the reveal block has passed
    finished = miner.run("once", REVEAL_WINDOW_BLOCKS=str(10**9))
    return Life(stopped, killed, (during, after), finished)


def test_row_15_a_stop_ends_a_measuring_miner_with_all_its_children(life: Life) -> None:
    status, err = life.stopped
    assert status == 0, err


def test_row_01_killed_between_commit_and_reveal_the_same_submission_is_finished(miner, life):
    assert life.killed.state is State.COMMITTED
    assert life.finished.returncode == 0, life.finished.stderr
    after = miner.latest()
    assert after is not None
    assert (after.id, after.submission_id) == (1, life.killed.submission_id)
    assert (after.salt, after.commit_hash) == (life.killed.salt, life.killed.commit_hash)
    assert after.state is State.VALIDATED
    assert after.rank == 1
    assert "VALIDATED, rank 1" in life.finished.stdout
    assert "cp .env.example .env" in life.finished.stdout


def shape(line: str) -> str:
    """Return a line of the summary without its numbers, time, commit and folder."""
    line = re.sub(r"/\S*/state/", "/.../state/", line.strip())
    line = re.sub(r"\d{4}-\d\d-\d\d \S+Z", "...", line)
    return re.sub(r"\d[\d,.]*", "#", re.sub(r"\b[0-9a-f]{40}\b", "COMMIT", line))


def test_the_sample_in_the_readme_has_the_lines_that_once_prints(life: Life) -> None:
    text = (PROJECT / "README.md").read_text()
    sample = re.findall(r"^    (?:submission|  \w+ ) .*$", text, re.M)
    assert len(sample) == 6
    shown = life.finished.stdout.splitlines()
    first = next(n for n, line in enumerate(shown) if line.startswith("submission  VALIDATED"))
    assert [shape(line) for line in shown[first : first + 6]] == [shape(line) for line in sample]


def test_status_shows_whether_a_miner_runs(life: Life) -> None:
    during, after = life.statuses
    assert (during["running"], after["running"]) == (True, False)
    assert during["submission"]["id"] == after["submission"]["id"] == 1
    assert "salt" not in after["submission"]


def test_the_claimed_commit_exists_and_the_claim_is_at_most_half_of_its_speed(miner, life):
    submission = miner.latest()
    assert submission is not None
    kind = run_git(miner.folder / "fork.git", "cat-file", "-t", str(submission.commit_hash))
    assert kind == "commit"
    report = load_report(miner.folder / str(submission.report))
    runs = accepted(m for m in report.measurements if m.length == TARGET)
    slowest = min(m.tokens_per_sec for m in runs)
    assert submission.tokens_per_sec is not None
    assert 0 < submission.tokens_per_sec <= 0.5 * slowest * (1 + 1e-9)
    assert report.commit == submission.commit_hash


def test_no_process_and_no_clone_remains(miner: Miner, life: Life) -> None:
    assert miner.descendants() == []
    assert list((miner.folder / "validator/validator/clones").iterdir()) == []


def test_row_30_secrets_reach_no_file_and_no_output(miner: Miner, life: Life) -> None:
    salt = str(life.killed.salt)
    assert len(salt) == 64
    assert salt not in life.finished.stdout + life.finished.stderr
    assert CANARY not in life.finished.stdout + life.finished.stderr
    assert miner.secret_holders(salt) == []


def test_the_state_is_private(miner: Miner, life: Life) -> None:
    assert miner.folder.stat().st_mode & 0o077 == 0
    assert (miner.folder / JOURNAL).stat().st_mode & 0o077 == 0
