"""The whole job on real parts: `python -m neurons.miner` as a person starts it, without a .env."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.claim.rejection import accepted
from harness.report import load_report
from neurons.miner.command_line.status import JOURNAL
from neurons.miner.cycle import State
from neurons.miner.journal import Journal, Submission
from tests import PROJECT
from tests.processes import HANG, children_of, wait_for
from tests.repositories import run_git
from tests.small_host import install_small_host

pytestmark = pytest.mark.slow

CANARY = "ghp_canary4af0c1e7b25d4af0c1e7b25d4af0c1e7"


@dataclass
class Miner:
    """Runs the command line on one state folder; its temporary folder marks every descendant.

    Attributes:
        path: PYTHONPATH, on which the host library of the fork is found.
    """

    state: Path
    temporary: Path
    path: str

    @property
    def folder(self) -> Path:
        return self.state / "embedded"

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "neurons.miner", *arguments, "--state-dir", str(self.state)],
            cwd=PROJECT,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.temporary),
                "PYTHONPATH": self.path,
                "TMPDIR": str(self.temporary),
                "ENV_FILE": "/dev/null",
                "GITHUB_TOKEN": CANARY,
                "DEVICE": "cpu",
                **environ,
            },
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
        with Journal(path) as journal:
            return next(iter(journal.latest()), None)

    def descendants(self) -> list[str]:
        """Return the command lines of living processes that any run of this miner started."""
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
        """Return the logs and reports that hold the salt, and every file that holds the token."""
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
    return Miner(root / "state", root / "tmp", install_small_host(root / "host"))


@pytest.fixture(scope="module")
def first(miner: Miner) -> subprocess.CompletedProcess[str]:
    return miner.run("once")


def test_the_first_run_ends_validated_at_rank_1(
    miner: Miner, first: subprocess.CompletedProcess[str]
) -> None:
    assert first.returncode == 0, first.stderr
    assert "VALIDATED, rank 1" in first.stdout
    assert "cp .env.example .env" in first.stdout
    submission = miner.latest()
    assert submission is not None
    assert submission.state is State.VALIDATED
    assert submission.rank == 1
    # what was submitted is in the repository that a validator clones
    kind = run_git(miner.folder / "fork.git", "cat-file", "-t", str(submission.commit_hash))
    assert kind == "commit"
    # and the claim keeps half of the slowest accepted run as headroom, at the target it names
    report = load_report(miner.folder / str(submission.report))
    runs = accepted(m for m in report.measurements if m.length == 2048)
    slowest = min(m.tokens_per_sec for m in runs)
    assert submission.tokens_per_sec is not None
    assert 0 < submission.tokens_per_sec <= 0.5 * slowest * (1 + 1e-9)
    assert report.commit == submission.commit_hash


def test_no_process_is_left(miner: Miner, first: subprocess.CompletedProcess[str]) -> None:
    assert miner.descendants() == []


def test_row_30_secrets_reach_no_file_and_no_output(
    miner: Miner, first: subprocess.CompletedProcess[str]
) -> None:
    salt = str(miner.latest().salt)  # type: ignore[union-attr]
    assert len(salt) == 64
    assert salt not in first.stdout + first.stderr
    assert CANARY not in first.stdout + first.stderr
    assert miner.secret_holders(salt) == []


def test_the_state_is_private(miner: Miner, first: subprocess.CompletedProcess[str]) -> None:
    assert miner.folder.stat().st_mode & 0o077 == 0
    assert (miner.folder / JOURNAL).stat().st_mode & 0o077 == 0


def test_row_01_killed_between_commit_and_reveal_the_same_submission_is_finished(
    miner: Miner, first: subprocess.CompletedProcess[str]
) -> None:
    before = miner.latest()
    assert before is not None
    # blocks enough that the reveal cannot come before the kill
    process = miner.start("once", CLAIM_RUNS="1", BLOCKS_UNTIL_REVEAL="5")

    def begun() -> Submission | None:
        latest = miner.latest()
        return latest if latest is not None and latest.id > before.id else None

    wait_for(begun, child=process)
    status = json.loads(miner.run("status", "--json").stdout)
    assert status["running"] is True
    assert status["submission"]["id"] == before.id + 1
    assert "salt" not in status["submission"]
    assert status["verdict"]["id"] == before.id
    second = miner.run("once")
    assert second.returncode == 78
    assert f"pid {process.pid}" in second.stderr
    assert "Traceback" not in second.stderr

    wait_for(lambda: (latest := begun()) and latest.state is State.COMMITTED, child=process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not miner.descendants())
    killed = miner.latest()
    assert killed is not None
    assert killed.state is State.COMMITTED
    assert json.loads(miner.run("status", "--json").stdout)["running"] is False

    resumed = miner.run("once")
    assert resumed.returncode == 0, resumed.stderr
    assert "VALIDATED" in resumed.stdout
    after = miner.latest()
    assert after is not None
    assert (after.id, after.submission_id) == (killed.id, killed.submission_id)
    assert (after.salt, after.commit_hash) == (killed.salt, killed.commit_hash)
    assert after.state is State.VALIDATED
    assert after.submission_id != before.submission_id
    # a life that was cut off told nobody its secrets, nor did the one that went on with them
    assert miner.secret_holders(str(after.salt)) == []
    assert str(after.salt) not in resumed.stdout + resumed.stderr
    assert miner.descendants() == []


def test_row_15_a_stop_ends_a_measuring_miner_soon_with_all_its_children(
    miner: Miner, first: subprocess.CompletedProcess[str]
) -> None:
    process = miner.start("run", TARGET_SEQUENCE_LENGTH="1024")  # another target is due at once

    def measuring() -> bool:
        latest = miner.latest()
        published = latest is not None and latest.state is State.PUBLISHED
        # the validator of this run starts workers too, before the miner has published
        return published and any("harness.worker" in one for one in children_of(process.pid))

    wait_for(measuring, child=process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    wait_for(lambda: not miner.descendants())
    latest = miner.latest()
    assert latest is not None
    assert latest.state is State.PUBLISHED  # where it will go on
