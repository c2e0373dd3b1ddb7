"""The miner as an operator runs it, with a .env, a wallet and a state folder."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from neurons.runtime.identity import create_throwaway
from tests import PROJECT
from tests.live.report import Entry, read_journal
from tests.live.services import Process, bare_environment


class Miner:
    """A miner with its own folder for settings, wallet, state and logs.

    `settings` are added to the .env.
    """

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self._folder = folder
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
        """Prepare the next cycle.

        Args:
            headroom: CLAIM_HEADROOM; large, because other processes use this CPU too.
            keep_measurements: whether the next submission uses the last one's report, as after a
                crash, instead of measuring the same commit again.
        """
        self._environment = {"CLAIM_HEADROOM": f"{headroom:.3f}"}
        reports = sorted((self._folder / "state" / "reports").glob("*.json"), key=os.path.getmtime)
        if keep_measurements and reports:
            commit_and_device = reports[-1].stem.rpartition("-")[0]
            following = self.entries()[-1].id + 1
            copy = reports[-1].with_name(f"{commit_and_device}-{following}.json")
            shutil.copyfile(reports[-1], copy)

    def run(self, command: str, seconds: float) -> int | None:
        """Run one of the miner's commands, with its output in `miner.log`.

        Returns the exit status; None if the command was stopped after `seconds`.
        """
        log_file = self._folder / "miner.log"
        with log_file.open("a") as log:
            log.write(f"==== {command}, {time.strftime('%H:%M:%S', time.gmtime())}\n")
        words = [sys.executable, "-m", "neurons.miner", command, "--env-file", str(self._env_file)]
        environment = bare_environment(self._folder, **self._environment)
        self._process = Process(words, environment, PROJECT, log_file)
        self._process.start()
        try:
            return self._process.wait(seconds)
        finally:
            self._process.stop()

    def kill(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    def entries(self) -> list[Entry]:
        return read_journal(self._journal, self.hotkey)
