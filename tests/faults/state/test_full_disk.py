"""A full disk: a tmpfs of four megabytes, filled to its last byte."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle, run_forever
from neurons.miner.journal import Journal
from neurons.miner.publishing.fork import Fork
from neurons.runtime import observe
from neurons.runtime.errors import Retry
from neurons.runtime.process import StateLock, Stopped, wait_for_space
from tests.neurons.miner.parts import Waits, make_context, stop_after
from tests.repositories import make_repository, run_git


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small separate file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may mount no tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk, and return the file to delete."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return ballast


def freed_at(count: int, ballast: Path) -> Callable[[float], None]:
    """Return a callback for `Waits` that frees the space at wait number `count`."""
    left = iter(range(count - 1, -1, -1))

    def then(seconds: float) -> None:
        if next(left, 1) == 0:
            ballast.unlink()

    return then


def test_row_17_a_start_waits_for_space_and_logs_it(disk: Path) -> None:
    state = disk / "state"
    waits = Waits(freed_at(3, fill(disk)))
    with capture_logs() as logs:
        wait_for_space(state, waits)
    assert len(waits.seconds) == 3
    assert [row["log_level"] for row in logs] == ["error"] * 3
    assert str(state) in str(logs[0])
    with StateLock(state), Journal(state / "journal.sqlite"):
        assert sorted(path.name for path in state.iterdir())[:2] == [
            "journal.sqlite",
            "journal.sqlite-shm",
        ]


def test_row_17_a_start_on_a_full_disk_can_be_stopped(disk: Path) -> None:
    fill(disk)
    with pytest.raises(Stopped):
        wait_for_space(disk / "state", stop_after(1))


def test_row_17_a_disk_may_fill_before_every_transition(disk, url, fake_api):
    """The disk is full before each transition, and each wait frees space."""
    context = make_context(disk / "state", url)
    ballast: list[Path] = []
    real = context.journal.transition

    def transition(*arguments: object, **names: object) -> object:
        if not ballast:
            ballast.append(fill(disk))
        return real(*arguments, **names)  # type: ignore[arg-type]

    context.journal.transition = transition  # type: ignore[method-assign,assignment]

    def free(seconds: float) -> None:
        if ballast:
            ballast[0].unlink(missing_ok=True)

    context.waiter = Waits(free)
    done = run_cycle(context)
    assert done.state is State.VALIDATED
    assert (len(fake_api.rows), fake_api.hash_mismatches) == (1, 0)


def test_row_17_the_daemon_survives_a_full_disk_between_cycles(disk, url, fake_api):
    context = make_context(disk / "state", url)
    seen: list[int] = []

    def then(seconds: float) -> None:
        if seconds == 5.0:
            seen.append(len(fake_api.rows))
            fake_api.round_id += 1
            fill(disk)
            if len(seen) == 3:
                raise Stopped("enough")
        else:
            (disk / "ballast").unlink(missing_ok=True)

    context.waiter = Waits(then)
    run_forever(context)
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("kind", ["clone", "checkout"])
def test_row_17_a_disk_may_fill_while_a_fork_is_published(kind, disk, tmp_path):
    """There is too little space for the overlay; then the space is freed."""
    upstream = make_repository(tmp_path / "upstream.git", {"fla/__init__.py": ""})
    if kind == "clone":
        fork = Fork(str(upstream), None, disk / "fork")
    else:
        run_git(disk, "clone", "-q", str(upstream), "checkout")
        fork = Fork(None, None, disk / "unused", repo_path=disk / "checkout")
    fork.prepare()
    if kind == "clone":
        fork.commit()
    shutil.rmtree(fork.worktree / "fla/ops")
    ballast = fill(disk)
    os.truncate(ballast, ballast.stat().st_size - 2**17)
    for _ in range(3):
        with pytest.raises(Retry, match="disk is full"):
            fork.prepare()
        assert len(list((fork.worktree / ".git").glob("*tmp*"))) == 0
    ballast.unlink()
    fork.prepare()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EAGAIN, errno.ENOENT])
def test_row_17_the_daemon_survives_a_system_that_refuses(miner, bench, waits, number):
    """For example a read-only disk, too many processes, or no folder for temporary files."""
    faults = [OSError(number, os.strerror(number)) for _ in range(2)]
    bench.faults[512] = [faults[0]]
    context = miner()
    digest = context.content_digest

    def content_digest() -> str:
        if len(faults) > 1 and context.journal.latest():
            raise faults.pop()
        return str(digest())

    context.content_digest = content_digest
    waits.then = lambda seconds: stop_after(1)(0) if seconds == 5.0 else None
    with capture_logs() as logs:
        run_forever(context)
    assert context.journal.get(1).state is State.VALIDATED
    reasons = [row["reason"] for row in logs if row["event"] == "paused"]
    assert len(reasons) == 2
    assert all(os.strerror(number) in reason for reason in reasons)


def test_row_17_a_log_on_a_full_disk_only_has_gaps(disk, capsys):
    observe.configure(file=disk / "logs" / "miner.log")
    ballast = fill(disk)
    for number in range(200):
        observe.get_logger("t").info("line", number=number, padding="x" * 100)
    ballast.unlink()
    observe.get_logger("t").info("space again")
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert shown.count("padding") == 200
    assert "space again" in (disk / "logs" / "miner.log").read_text()
