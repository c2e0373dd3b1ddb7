"""Files and folders of another user: each command names the fault."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neurons.miner import __main__ as miner
from neurons.miner.command_line import doctor, machine_checks
from neurons.miner.command_line.status import JOURNAL
from neurons.miner.journal import Journal
from neurons.runtime.errors import ConfigError
from neurons.runtime.identity import load_identity
from neurons.runtime.settings import Settings

NOBODY = 65534


@contextmanager
def as_another_user() -> Iterator[None]:
    """Drop root's rights during the block."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """A state folder with a journal that this user cannot read."""
    Journal(tmp_path / "embedded" / JOURNAL).close()
    tmp_path.chmod(0)
    yield tmp_path
    tmp_path.chmod(0o700)


NOT_WRITABLE = "cannot be written (Permission denied). Make the user"
NOT_READABLE = "belongs to another user: run this as the user that runs the miner"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("once", NOT_WRITABLE),
        ("bench", NOT_WRITABLE),
        ("status", NOT_READABLE),
        ("logs", NOT_READABLE),
        ("backup copy.sqlite", NOT_READABLE),
        ("release", NOT_READABLE),
    ],
)
def test_a_command_reports_a_state_folder_of_another_user(command, message, foreign, capsys):
    with as_another_user():
        flags = ["--env-file", os.devnull, "--state-dir", str(foreign), "--device", "cpu"]
        status = miner.main([*flags, *command.split()])
    out, err = capsys.readouterr()
    assert status == 78
    assert err.startswith(f"The state folder {foreign}/embedded ")
    assert message in err
    assert out == ""
    assert not Path("copy.sqlite").exists()


def test_doctor_reports_a_state_folder_that_it_cannot_read(monkeypatch):
    monkeypatch.setattr(machine_checks, "software", lambda device: iter(()))
    # other users cannot enter pytest's own temporary folders
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        closed = Path(name, "state")
        closed.mkdir(mode=0)
        settings = Settings(state_dir=closed / "embedded", device="cpu")
        with as_another_user():
            findings = {one.name: one for one in doctor.examine(settings, embedded=True)}
    disk, fork = findings["disk"], findings["fork"]
    assert disk.level == fork.level == "failure"
    assert disk.detail == f"{closed} cannot be written (Permission denied)"
    assert fork.detail == f"{closed}/embedded/fork cannot be read (Permission denied)"
    assert "set STATE_DIR" in disk.remedy
    assert "another STATE_DIR" in fork.remedy


def test_settings_wallets_and_backups_of_another_user_are_reported(capsys):
    # other users cannot enter pytest's own temporary folders
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings, copy = folder / "a.env", folder / "a.sqlite"
        flags = ["--state-dir", f"{name}/new"]
        settings.touch(mode=0)
        Journal(copy).close()
        copy.chmod(0)
        wallet = folder / "wallets/w"
        wallet.mkdir(parents=True, mode=0o700)
        folder.chmod(0o711)
        with as_another_user():
            with pytest.raises(ConfigError, match="a folder that this user cannot read"):
                load_identity("w", "h", folder / "wallets")
            assert miner.main(["--env-file", str(settings), *flags, "status"]) == 78
            assert miner.main(["--env-file", os.devnull, *flags, "restore", str(copy)]) == 78
        assert not (folder / "new").exists()
    assert capsys.readouterr().err.splitlines() == [
        f"{settings} cannot be read (Permission denied): "
        f"give it to the user that starts this program, and chmod 600 {settings}.",
        f"The journal {copy} cannot be read. Check its owner and mode.",
    ]
