"""Proposals by real commands: what is taken, what is refused and why, and what a stop leaves."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.ab_compare import BLOCKS
from harness.measuring.runner import MeasurementError
from harness.sample import Sample
from harness.source import source_digest
from neurons.miner.proposal import Refused
from neurons.miner.publishing.tuned_kernels import FILE, Evidence, TunedKernels, copy_overlay
from neurons.miner.tuner import Tuner
from neurons.runtime.observe import get_logger
from quasar_kernels.contract import OVERLAY, QUASAR_DIR, overlay_digest
from tests.harness import samples
from tests.neurons.miner.parts import ENVIRONMENT, make_settings
from tests.processes import HANG, is_alive, wait_for
from tests.small_fla import install_small_fla

CHUNK = QUASAR_DIR / "chunk.py"
FASTER = f"open('{CHUNK}', 'a').write('# FASTER\\n')"


class Bench:
    """Times a tree by what its chunk.py says, and finds wrong what says WRONG."""

    def __init__(self) -> None:
        self.speeds = iter(range(1000))

    def measure(self, tree: Path, length: int, *_: Any, **__: Any) -> Sample:
        faster = 1.2 if "# FASTER" in (tree / CHUNK).read_text() else 1.0
        return samples.make_sample(length, faster * (1000 + next(self.speeds)))

    def check(self, tree: Path, length: int, *_: Any) -> Any:
        passed = "# WRONG" not in (tree / CHUNK).read_text()
        return samples.make_correctness(passed=passed, longest=length)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A fork's worktree that nobody imports."""
    copy_overlay(OVERLAY, tmp_path / "host")
    return tmp_path / "host"


@pytest.fixture
def tuner(tmp_path: Path, host: Path) -> Tuner:
    settings, bench = make_settings(tmp_path / "state", tune_seconds=HANG), Bench()
    parts: dict[str, Any] = {"check": bench.check, "measure": bench.measure}
    return Tuner(
        *(settings, TunedKernels(settings.state_dir), host, get_logger("test")),
        **parts,
        probe=lambda *_: ENVIRONMENT,
    )


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_gain_beyond_the_noise_is_published_with_its_evidence(tuner):
    before = tuner.kept.digest()
    found = tuner.try_one(python(FASTER), 512)
    assert found.low > 1.18
    root, evidence = tuner.kept.root(), tuner.kept.evidence()
    assert (root / CHUNK).read_text() == (OVERLAY / CHUNK).read_text() + "# FASTER\n"
    assert tuner.kept.digest() == overlay_digest(root=root) != before
    assert evidence is not None
    assert (evidence.length, evidence.pairs, evidence.low) == (512, BLOCKS, found.low)
    assert evidence.proposed_by == python(FASTER)
    with pytest.raises(Refused, match="not beyond the noise"):
        tuner.try_one(python(FASTER), 512)  # starts from what was taken, and gains nothing more
    assert tuner.kept.root() == root


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit('no GPU here')", "status 1: no GPU here"),
        ("pass", "Nothing that is published was changed"),
        (f"open('{CHUNK}', 'a').write('# slower')", "not beyond the noise"),
        (f"open('{CHUNK}', 'w').write('import torch')", "breaks the rules"),
        (f"import os; os.symlink('/etc/passwd', '{QUASAR_DIR}/x.py')", "x.py is no ordinary file"),
        ("open('fla/ops/other.py', 'w')", "other.py is outside fla/ops/quasar"),
        (f"open('{QUASAR_DIR}/x.so', 'w')", "x.so: The file is compiled"),
        (f"open('{QUASAR_DIR}/x.py', 'w').write('#' * 2**22)", "too long: 4,194,304"),
    ],
)
def test_what_is_refused_is_told_why_and_leaves_the_kernels(tuner, code, why):
    with pytest.raises(Refused, match=why):
        tuner.try_one(python(code), 512)
    assert tuner.kept.root() == OVERLAY


def test_wrong_kernels_are_not_even_timed(tuner):
    code = f"open('{CHUNK}', 'a').write('# FASTER # WRONG')"
    with pytest.raises(MeasurementError, match="wrong results"):
        tuner.try_one(python(code), 512)
    assert tuner.kept.root() == OVERLAY
    with pytest.raises(Refused, match="cannot be started"):
        tuner.try_one(["/nonexistent/optimiser"], 512)


def test_a_command_sees_no_secret(tuner, monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", "ghp_canary")
    tell = "import os, sys; sys.exit(' '.join(map('='.join, os.environ.items())))"
    with pytest.raises(Refused, match="TARGET_SEQUENCE_LENGTH=512") as refused:
        tuner.try_one(python(tell), 512)
    assert "canary" not in str(refused.value)


FORKS = (
    "import os, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
    "open({note!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
    "time.sleep(3600)\n"
)


def test_a_command_that_hangs_is_killed_with_its_children(tuner, tmp_path):
    note = tmp_path / "pids"
    for seconds in (1, 10, 100):  # until the limit leaves time for both to start
        tuner.settings = tuner.settings.model_copy(update={"tune_seconds": float(seconds)})
        with pytest.raises(Refused, match=f"not done within {seconds} s"):
            tuner.try_one(python(FORKS.format(note=str(note))), 512)
        if note.exists():
            break
    wait_for(lambda: not any(is_alive(int(pid)) for pid in note.read_text().split()))


def test_a_stop_ends_it_at_once_and_the_next_cycle_makes_it_due(tuner, tmp_path):
    note, file = tmp_path / "pids", tmp_path / "hang.py"
    file.write_text(FORKS.format(note=str(note)))
    command = f"{sys.executable} {file}"
    tuner.settings = tuner.settings.model_copy(update={"tune_command": command})
    tuner.start(512)
    wait_for(lambda: note.exists() and len(note.read_text().split()) == 2)
    tuner.start(512)  # it is at work already
    tuner.stop()
    wait_for(lambda: not any(is_alive(int(pid)) for pid in note.read_text().split()))
    note.unlink()
    tuner.start(512)  # once after each cycle
    assert tuner._thread is None
    assert tuner.kept.root() == OVERLAY


def test_nothing_is_tried_unless_it_is_asked_for(tuner):
    assert list(tuner.commands()) == []
    asked = {"agent_iterations": 7, "tune_gpus": 2, "tune_command": "optimise --mine 'a b'"}
    tuner.settings = tuner.settings.model_copy(update=asked)
    search, own = tuner.commands()
    assert search[0] == sys.executable
    assert search[search.index("--more") + 1] == "7"
    assert search[search.index("--gpus") + 1] == "2"
    assert find_spec(search[2])
    assert list(own) == ["optimise", "--mine", "a b"]


def test_the_search_says_that_it_needs_a_gpu(tuner):
    tuner.settings = tuner.settings.model_copy(
        update={"agent_iterations": 1, "device": "cpu", "tune_seconds": HANG}
    )
    (search,) = tuner.commands()
    with pytest.raises(Refused, match="searched on an NVIDIA GPU"):
        tuner.try_one(search, 512)


def evidence_of(overlay: Path, shipped: str) -> Evidence:
    return Evidence(
        shipped=shipped,
        overlay=overlay_digest(root=overlay),
        proposed_by=("me",),
        gpu=None,
        length=512,
        pairs=5,
        ratio=2.0,
        low=1.5,
        high=2.5,
        at=datetime.now(timezone.utc),
    )


def test_kernels_tuned_for_others_or_damaged_are_not_published(tmp_path):
    kept, overlay = TunedKernels(tmp_path), tmp_path / "overlay"
    copy_overlay(OVERLAY, overlay)
    with (overlay / CHUNK).open("a") as file:
        file.write("# tuned\n")
    kept.take(overlay, evidence_of(overlay, "an older version"))
    assert kept.root() == OVERLAY
    kept.take(overlay, evidence_of(overlay, overlay_digest()))
    assert (kept.root() / CHUNK).read_text().endswith("# tuned\n")
    whole = (kept.folder / FILE).read_bytes()
    (kept.folder / FILE).write_bytes(whole[:-20])
    assert kept.root() == OVERLAY
    (kept.folder / FILE).write_bytes(whole)
    os.truncate(kept.folder / overlay_digest(root=overlay) / CHUNK, 10)
    assert kept.root() == OVERLAY


@pytest.mark.slow
def test_a_real_worker_checks_what_a_real_command_changes(tmp_path):
    """The trees are imported and computed with; the speeds are given, whatever else runs here."""
    host = Path(install_small_fla(tmp_path / "host"))
    (host / "fla/layers").mkdir(exist_ok=True)
    (host / "fla/layers/__init__.py").touch()
    settings = make_settings(tmp_path / "state", tune_seconds=HANG)
    kept = TunedKernels(settings.state_dir)
    bench = Bench()

    def measure(tree: Path, length: int, *_: Any, **__: Any) -> Sample:
        sample = bench.measure(tree, length)
        return sample.model_copy(update={"source_digest": source_digest(tree)})

    tuner = Tuner(settings, kept, host, get_logger("test"), measure=measure)
    assert tuner.try_one(python(FASTER), 64).faster
    assert "# FASTER" in (kept.root() / CHUNK).read_text()
