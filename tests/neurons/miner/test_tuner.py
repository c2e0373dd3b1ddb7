"""Proposals by real commands: acceptance, rejections with their reasons, time limits and stops."""

import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.ab_compare import BLOCKS
from harness.measuring.runner import MeasurementError
from harness.sample import Sample
from harness.source import source_digest
from neurons.miner.publishing.tuned_kernels import FILE, Evidence, TunedKernels
from neurons.miner.tuner import Rejected, Tuner
from neurons.runtime.observe import get_logger
from quasar_kernels.contract import OVERLAY, QUASAR_DIR, copy_overlay, overlay_digest
from tests.harness import samples
from tests.neurons.miner.parts import ENVIRONMENT, make_settings
from tests.processes import HANG, is_alive, wait_for
from tests.small_fla import install_small_fla

CHUNK = QUASAR_DIR / "chunk.py"
FASTER = f"open('{CHUNK}', 'a').write('# FASTER\\n')"


class Bench:
    """Takes speed and correctness from the marks FASTER and WRONG in a tree's chunk.py."""

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
    """A fork's worktree that is not imported."""
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
    before = tuner.tuned.digest()
    difference = tuner.try_one(python(FASTER), 512)
    assert difference.low > 1.18
    root, evidence = tuner.tuned.root(), tuner.tuned.evidence()
    assert (root / CHUNK).read_text() == (OVERLAY / CHUNK).read_text() + "# FASTER\n"
    assert tuner.tuned.digest() == overlay_digest(root=root) != before
    assert evidence is not None
    assert (evidence.length, evidence.pairs, evidence.low) == (512, BLOCKS, difference.low)
    assert evidence.proposed_by == python(FASTER)
    with pytest.raises(Rejected, match="within the noise"):
        tuner.try_one(python(FASTER), 512)  # starts from the tuned kernels and gains nothing more
    assert tuner.tuned.root() == root


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit('no GPU here')", "status 1: no GPU here"),
        ("", "cannot be started"),
        (f"open('{CHUNK}', 'a').write('# FASTER # WRONG')", "wrong results"),
        ("pass", "The command changed no published file"),
        (f"open('{CHUNK}', 'a').write('# slower')", "within the noise"),
        (f"open('{CHUNK}', 'w').write('import torch')", "breaks the rules"),
        (f"import os; os.symlink('/etc/passwd', '{QUASAR_DIR}/x.py')", "is not a regular file"),
        ("open('fla/ops/other.py', 'w')", "other.py is outside fla/ops/quasar"),
        (f"open('{QUASAR_DIR}/x.so', 'w')", "x.so: The file is compiled"),
        (f"open('{QUASAR_DIR}/x.py', 'w').write('#' * 2**22)", "has 4,194,304 bytes"),
    ],
)
def test_a_rejection_has_its_reason_and_changes_no_kernels(tuner, code, why):
    with pytest.raises((Rejected, MeasurementError), match=why):
        tuner.try_one(python(code) if code else ["/nonexistent/optimiser"], 512)
    assert tuner.tuned.root() == OVERLAY


def test_a_command_sees_no_secret(tuner, monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", "ghp_canary")
    show = "import os, sys; sys.exit(' '.join(map('='.join, os.environ.items())))"
    with pytest.raises(Rejected, match="TARGET_SEQUENCE_LENGTH=512") as rejected:
        tuner.try_one(python(show), 512)
    assert "canary" not in str(rejected.value)


def test_a_command_that_hangs_is_rejected(tuner):
    tuner.settings = tuner.settings.model_copy(update={"tune_seconds": 0.2})
    with pytest.raises(Rejected, match=r"not done within 0\.2 s"):
        tuner.try_one(python("import time; time.sleep(3600)"), 512)


def test_a_stopped_command_does_not_restart_in_the_same_cycle(tuner, tmp_path):
    note, file = tmp_path / "pids", tmp_path / "hang.py"
    file.write_text(
        f"import os, time\nopen({str(note)!r}, 'w').write(f'{{os.getpid()}} ')\ntime.sleep(3600)\n"
    )
    command = f"{sys.executable} {file}"
    tuner.settings = tuner.settings.model_copy(update={"tune_command": command})
    tuner.start(512)
    wait_for(lambda: note.exists() and note.read_text().endswith(" "))
    tuner.start(512)  # does nothing: it is running
    tuner.stop()
    assert not is_alive(int(note.read_text()))
    tuner.start(512)  # does nothing: one proposal per cycle
    assert (tuner._thread, tuner.tuned.root()) == (None, OVERLAY)


def test_the_settings_select_the_commands(tuner):
    assert list(tuner.commands()) == []
    update = {"agent_iterations": 7, "tune_command": "optimise --mine 'a b'", "device": "cpu"}
    tuner.settings = tuner.settings.model_copy(update=update)
    search, own = tuner.commands()
    assert list(own) == ["optimise", "--mine", "a b"]
    with pytest.raises(Rejected, match="need an NVIDIA GPU"):  # the real search
        tuner.try_one(search, 512)


def evidence_of(overlay: Path, shipped: str) -> Evidence:
    gain: dict[str, Any] = {"length": 512, "pairs": 5, "ratio": 2.0, "low": 1.5, "high": 2.5}
    gain |= {"proposed_by": ("me",), "gpu": None, "at": datetime.now(timezone.utc)}
    return Evidence(shipped=shipped, overlay=overlay_digest(root=overlay), **gain)


def test_outdated_or_damaged_tuned_kernels_are_not_used(tmp_path):
    tuned, overlay = TunedKernels(tmp_path), tmp_path / "overlay"
    copy_overlay(OVERLAY, overlay)
    with (overlay / CHUNK).open("a") as file:
        file.write("# tuned\n")
    tuned.publish(overlay, evidence_of(overlay, "an older version"))
    assert tuned.root() == OVERLAY
    tuned.publish(overlay, evidence_of(overlay, overlay_digest()))
    assert (tuned.root() / CHUNK).read_text().endswith("# tuned\n")
    whole = (tuned.folder / FILE).read_bytes()
    (tuned.folder / FILE).write_bytes(whole[:-20])
    assert tuned.root() == OVERLAY
    (tuned.folder / FILE).write_bytes(whole)
    os.truncate(tuned.folder / overlay_digest(root=overlay) / CHUNK, 10)
    assert tuned.root() == OVERLAY


@pytest.mark.nightly
@pytest.mark.slow
def test_a_real_worker_checks_the_proposal_of_a_real_command(tmp_path):
    """Real workers import and check the trees; only the speeds are fake."""
    host = Path(install_small_fla(tmp_path / "host"))
    settings = make_settings(tmp_path / "state", tune_seconds=HANG)
    tuned, bench = TunedKernels(settings.state_dir), Bench()

    def measure(tree: Path, length: int, *_: Any, **__: Any) -> Sample:
        sample = bench.measure(tree, length)
        return sample.model_copy(update={"source_digest": source_digest(tree)})

    tuner = Tuner(settings, tuned, host, get_logger("test"), measure=measure)
    assert tuner.try_one(python(FASTER), 64).faster
    assert "# FASTER" in (tuned.root() / CHUNK).read_text()
