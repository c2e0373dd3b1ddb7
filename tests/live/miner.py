"""Our miner as an operator runs it: a .env, a wallet, `once`, and a journal to read afterwards."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from neurons.runtime.identity import create_throwaway
from tests import PROJECT
from tests.live.report import Entry, read_journal
from tests.live.services import Process, bare_environment


class Miner:
    """One state folder with its settings.

    Args:
        python: the interpreter with the miner's requirements.
        folder: where settings, wallet, state and logs lie.
        settings: what the .env sets besides.

    Attributes:
        hotkey: the throwaway's address.
    """

    def __init__(self, python: str, folder: Path, settings: dict[str, object]) -> None:
        self._python, self._folder = python, folder
        self._env_file = folder / ".env"
        self._environment: dict[str, str] = {}
        self._process: Process | None = None
        self.hotkey = create_throwaway(folder / "wallets", "miner").hotkey
        self._journal = folder / "state" / "journal.sqlite"
        lines = {
            "STATE_DIR": folder / "state",
            "WALLET_PATH": folder / "wallets",
            "WALLET_MINER_NAME": "miner",
            "SUBTENSOR_NETWORK": "offline",
            "DEVICE": "cpu",
            "CLAIM_RUNS": 1,
            **settings,
        }
        self._env_file.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
        self._env_file.chmod(0o600)

    def prepare(self, headroom: float, *, keep_measurements: bool) -> None:
        """Set how far the next claim keeps below the measurements.

        Args:
            headroom: a share; other processes use this CPU, and the claim has to hold anyway.
            keep_measurements: let the next submission find the last one's report as its own, as
                after a crash, in place of measuring the same commit again.
        """
        self._environment = {"CLAIM_HEADROOM": f"{headroom:.3f}"}
        reports = sorted((self._folder / "state" / "reports").glob("*.json"), key=_written)
        if keep_measurements and reports:
            commit_and_device = reports[-1].stem.rpartition("-")[0]
            following = self.entries()[-1].id + 1
            copy = reports[-1].with_name(f"{commit_and_device}-{following}.json")
            shutil.copyfile(reports[-1], copy)

    def run(self, command: str, seconds: float) -> int | None:
        """Run one of the miner's commands, which its output in `miner.log` names.

        Returns:
            The exit status; None when it took longer than `seconds` and was stopped.
        """
        log_file = self._folder / "miner.log"
        with log_file.open("a") as log:
            log.write(f"==== {command}, {time.strftime('%H:%M:%S', time.gmtime())}\n")
        words = [self._python, "-m", "neurons.miner", command, "--env-file", str(self._env_file)]
        environment = bare_environment(self._folder, **self._environment)
        self._process = Process(words, environment, PROJECT, log_file)
        self._process.start()
        try:
            return self._process.wait(seconds)
        finally:
            self._process.stop()

    def kill(self) -> None:
        """End a running command at once, as a power cut does."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    def entries(self) -> list[Entry]:
        """Return every submission of the journal, oldest first."""
        return read_journal(self._journal, self.hotkey)


def _written(path: Path) -> float:
    return path.stat().st_mtime
