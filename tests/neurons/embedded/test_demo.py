"""The parts of a competition against a real API, its log tail, and a miner that joins the pages."""

import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import pytest
from dotenv import dotenv_values

from harness.worker.checks import find_broken_rules
from neurons.embedded import __main__ as program
from neurons.embedded.__main__ import CHUNK, GUEST, RANKING, Demo
from neurons.embedded.subnet import LogTail
from neurons.runtime import observe
from neurons.runtime.errors import ConfigError
from neurons.runtime.identity import Identity, create_throwaway
from neurons.runtime.process import Stopped
from neurons.validator.clone import Sources, clone
from quasar_kernels.contract import LAYER_FILE, OVERLAY, QUASAR_DIR
from tests import PROJECT
from tests.neurons.live_api import VALIDATOR, Hotkey, LiveApi, submission
from tests.processes import HANG, started, wait_for
from tests.repositories import run_git
from tests.small_fla import install_small_fla


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Demo:
    monkeypatch.setenv("TARGET_SEQUENCE_LENGTH", "512")
    stop = threading.Event()
    return Demo(tmp_path / "home", 2, inference=True, cheat=True, stop=stop)


def test_each_miner_has_its_own_hotkey_kernel_and_server(demo: Demo) -> None:
    hotkeys = [entry.identity.hotkey for entry in demo.entries]
    assert len(set(hotkeys)) == 3
    assert len({entry.chunk for entry in demo.entries}) == 3
    servers = demo.settings.inference_servers
    assert [server.split("=")[0] for server in servers] == hotkeys[:2]
    addresses = {*(server.split("=")[1] for server in servers)}
    assert len(addresses | {demo.settings.reference_inference_url}) == 3
    text = (OVERLAY / QUASAR_DIR / "chunk_torch.py").read_text()
    assert text.count(CHUNK.format(64)) == 1  # the line that each miner changes


def test_the_cheat_submits_a_fork_that_keeps_the_rules(demo, api, tmp_path, monkeypatch):
    used = shutil.copytree(OVERLAY, tmp_path / "overlay")
    py_compile.compile(str(used / LAYER_FILE), doraise=True)  # as after an import
    monkeypatch.setattr(program, "OVERLAY", used)
    *_, cheat = demo.entries
    demo.url = api.url
    demo.submit_cheat(cheat)
    (row,) = api.get("/get_submission_stats")["recent_submissions"]
    assert (row["miner_hotkey"], row["target_sequence_length"]) == (cheat.identity.hotkey, 512)
    home = Sources(files=True)
    tree = clone(row["fork_url"], row["commit_hash"], tmp_path, sources=home)
    assert find_broken_rules(str(tree)).texts == ()
    assert "Skip the recurrence" in (tree / QUASAR_DIR / "chunk.py").read_text()
    assert run_git(tree, "rev-parse", "HEAD") == row["commit_hash"]


class _Key(Hotkey):
    """A participant's identity as the Hotkey that the API's helpers require."""

    def __init__(self, identity: Identity) -> None:
        Identity.__init__(self, identity.hotkey, identity._keypair)


def test_the_table_shows_the_ended_round(demo: Demo, api: LiveApi) -> None:
    lines: deque[dict[str, Any]] = deque([{"event": "judging", "submission": 1}])
    demo.url, demo.subnet.validator = api.url, VALIDATOR
    demo.subnet.lines = lines
    for entry, speed, score in zip(demo.entries, (10.0, 20.0, 5e6), (1.0, 1.0, 0.0), strict=True):
        key = _Key(entry.identity)
        api.register(key)
        row = api.ok("/submit_kernel", submission(key, speed), key)["submission_id"]
        assert not demo.read_verdicts()
        api.mark(row, score)
        verdict = {"event": "verdict", "submission": row, "reason": f"because of {entry.name}"}
        lines.append(verdict)
    assert demo.read_verdicts()
    assert not demo.is_expected()  # weights exist only after the round
    assert demo.end_round() == "round 1 has ended"
    demo.read_verdicts()
    rows = [str(entry).split() for entry in demo.entries]
    assert [[*words[:2], *words[-4:]] for words in rows] == [
        ["2", "miner-1", "0.25", "because", "of", "miner-1"],
        ["1", "miner-2", "0.60", "because", "of", "miner-2"],
        ["-", "cheat", "0.00", "because", "of", "cheat"],
    ]
    assert demo.is_expected()
    demo.entries[2].weight = 0.05
    assert not demo.is_expected()


def test_an_earlier_competition_is_deleted(demo: Demo) -> None:
    names = ("miner-1/state/journal", "cheat.git/HEAD", f"{GUEST}/a", f"{RANKING}/a.db", "port")
    files = [demo.folder / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    demo._stop.set()
    with pytest.raises(Stopped):
        list(demo.run())
    assert [file.exists() for file in files] == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(Stopped("stop requested"), 130, "stopped"), (ConfigError("Do this."), 78, "Do this.")],
)
def test_an_early_end_has_a_message_and_a_status(error, status, message, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(program, "Demo", fail)
    assert program.main([]) == status
    assert "".join(capsys.readouterr()).startswith(message)


def line(event: str, **details: object) -> str:
    return json.dumps({"event": event, "level": "info", **details}) + "\n"


def test_the_log_tail_shows_complete_lines_once_also_of_a_truncated_log(tmp_path, capsys):
    observe.configure()
    file = tmp_path / "log"
    file.write_text(line("of an earlier run"))
    tail = LogTail("miner-1", file)
    first = line("measured", length=512)
    with file.open("a") as log:
        log.write(first[:20])
        log.flush()
        assert tail.show() == []
        log.write(first[20:] + "Traceback: a\n" + line("claimed") + '"text"\n')
        log.flush()
        assert [entry["event"] for entry in tail.show()] == ["measured", "claimed"]
        assert tail.show() == []
    file.write_text(line("new"))
    assert [entry["event"] for entry in tail.show()] == ["new"]
    shown = "".join(capsys.readouterr())
    assert shown.count("miner-1: measured") == 1
    assert "earlier" not in shown


FAKE_BENCH = """
import sys
from harness.measuring import runner

runner.probe = lambda *_: parts.ENVIRONMENT
runner.measure = lambda *words, **options: bench(*words, **options)
runner.check = lambda *words: bench.check(*words)

from neurons.miner import __main__ as miner
from tests.neurons.miner import parts

bench = parts.FakeBench(factor=0.01)
sys.exit(miner.main(sys.argv[1:]))
"""
"""Runs the miner with fake measurements, which are slower than any machine."""


@pytest.mark.slow
def test_miners_join_the_pages(tmp_path: Path) -> None:
    """The pages run without a competition; miners start as the systemd template starts them.

    A second one has another settings file and state folder.
    """
    short = {"TARGET_SEQUENCE_LENGTH": "512", "CLAIM_RUNS": "1", "DEVICE": "cpu"}
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", **short}
    env["PYTHONPATH"] = f"{install_small_fla(tmp_path / 'host')}:{PROJECT}"
    unit = (PROJECT / "scripts/systemd/quasar-miner@.service").read_text()
    template = re.findall(r'^ExecStart="@ROOT@/START_MINER.sh" (.*)', unit, re.M)[0]

    def miner(number: str, *words: str) -> subprocess.Popen[str]:
        create_throwaway(guest.parent / "wallets", f"guest-{number}")
        own = guest.read_text().replace("=guest", f"=guest-{number}")
        own = own.replace("/guest/", f"/guest-{number}/")
        (tmp_path / f".env.{number}").write_text(own)
        flags = template.replace("%i", number).split()
        visible = {**env, "CUDA_VISIBLE_DEVICES": number}
        command = [sys.executable, "-c", FAKE_BENCH, *words, *flags]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=tmp_path, env=visible, stdout=pipe, text=True)

    words = ("-m", "neurons.embedded", "--miners", "0", "--folder", str(tmp_path / "home"))
    with started(*words, env=env, stdout=subprocess.PIPE) as subnet:
        guest = tmp_path / "home/embedded/guest.env"
        wait_for(guest.exists, child=subnet)
        assert guest.stat().st_mode & 0o077 == 0
        stats = f"{dotenv_values(guest)['VALIDATOR_API_URL']}/get_submission_stats"
        with miner("0", "once") as first:
            try:
                wait_for(lambda: httpx.get(stats).json()["recent_submissions"], child=first)
            finally:
                first.kill()
        assert (tmp_path / "state-0/journal.sqlite").exists()
        with miner("1", "status", "--json") as other:
            second = json.loads(other.communicate()[0])
        assert (second["state_dir"], second["submission"]) == (str(tmp_path / "state-1"), None)
        subnet.send_signal(signal.SIGINT)
        output, _ = subnet.communicate(timeout=HANG)
    assert subnet.returncode == 0
    assert f"ENV_FILE={guest} ./START_MINER.sh once" in output
