"""The commands `backup`, which works while the miner runs, and `restore`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import click

from neurons.miner.command_line.commands import echo, read_settings
from neurons.miner.command_line.status import JOURNAL, find_journal
from neurons.miner.journal import Journal
from neurons.miner.schema import write_copy
from neurons.miner.watcher import copy_of
from neurons.runtime.errors import ConfigError, Problem
from neurons.runtime.flags import CommandLineSettings, Folder
from neurons.runtime.identity import public_hotkey
from neurons.runtime.process import StateLock
from neurons.runtime.settings import Settings

MAGIC = b"SQLite format 3\0"
PREVIOUS = "journal.previous.sqlite"


@click.argument("file", type=Folder())
def backup(given: CommandLineSettings, file: Path) -> int:
    """Copy the journal to FILE, even while the miner runs."""
    settings, _ = read_settings(given, process=None)
    journal = find_journal(settings.state_dir)
    if journal is None:
        raise ConfigError(f"Nothing has run in {settings.state_dir}, so there is no journal yet.")
    if file.exists():
        raise ConfigError(f"{file} already exists. Name another file, or remove it first.")
    write_copy(journal, file)
    echo(f"the journal is copied to {file}; keep it private: it may have the salt of a commitment")
    return 0


@click.argument("file", type=Folder(), required=False)
def restore(given: CommandLineSettings, file: Path | None) -> int:
    """Restore the journal from FILE or JOURNAL_COPY; keep the old."""
    settings, _ = read_settings(given, process=None)
    file = file or find_copy(settings)
    if not file.is_file():
        problem = f"{file} is a folder" if file.is_dir() else f"There is no file {file}"
        raise ConfigError(f"{problem}. Name a file that `backup` made.")
    with suppress(OSError), file.open("rb") as stream:  # copying reports an unreadable file
        if stream.read(len(MAGIC)) != MAGIC:
            raise ConfigError(f"{file} is not a copy of a journal. Name a file that `backup` made.")
    with Journal(file, copy=True) as journal:
        latest = next(iter(journal.latest()), None)
    with StateLock(settings.state_dir):
        present = settings.state_dir / JOURNAL
        part = present.with_suffix(".part")
        write_copy(file, part)
        replaced = present.exists()
        if replaced:
            os.replace(present, settings.state_dir / PREVIOUS)
        for rest in ("-wal", "-shm"):  # they belong to the replaced file
            left = present.with_name(present.name + rest)
            if left.exists():
                os.replace(left, settings.state_dir / (PREVIOUS + rest))
        os.replace(part, present)
    newest = "it is empty" if latest is None else f"its newest submission is {latest.state.value}"
    earlier = f"; the earlier journal is now {PREVIOUS}" if replaced else ""
    echo(f"restored from {file}: {newest}{earlier}")
    return 0


def find_copy(settings: Settings) -> Path:
    """Return the copy in JOURNAL_COPY of the hotkey's journal; or raise a ConfigError."""
    folder = settings.journal_copy
    if folder is None:
        raise ConfigError("JOURNAL_COPY is not set: name the file that `backup` made.")
    hotkey = public_hotkey(*settings.miner_wallet)
    copies = [copy_of(folder, hotkey)] if hotkey else sorted(folder.glob("journal-*.sqlite"))
    if len(copies) == 1:
        return copies[0]
    problem = f"The hotkey cannot be read, and JOURNAL_COPY={folder} has {len(copies)} copies."
    raise ConfigError(Problem(problem, "Name one of its files, or put the hotkey back."))


def require_no_lost_journal(
    settings: Settings, hotkey: str, script: str = "./START_MINER.sh"
) -> None:
    """Raise a ConfigError if only a copy of the journal is left, which a new one would replace."""
    copy = settings.journal_copy and copy_of(settings.journal_copy, hotkey)
    if copy and copy.exists() and find_journal(settings.state_dir) is None:
        problem = f"The journal in {settings.state_dir} is lost, and JOURNAL_COPY has {copy}."
        remedy = f"Run `{script} restore`, or move the copy away to start without it."
        raise ConfigError(Problem(problem, remedy))
