"""Judging a tree without a claim: this project's fork passes, broken ones fail with a reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.analysis.judge import Finding, judge_tree
from harness.source import source_digest
from quasar_kernels.contract import REQUIRED_IMPORTS, TARGET_FILES
from tests.forks import make_fork
from tests.harness import honest
from tests.processes import HANG
from tests.repositories import write_files

OPERATOR, LAYER = "fla/ops/quasar/chunk.py", "fla/layers/quasar.py"


def wrapped(result: str) -> str:
    return (
        "\n_right = chunk_quasar\n"
        "def chunk_quasar(*args, **options):\n"
        "    o, state = _right(*args, **options)\n"
        f"    return {result}, state\n"
    )


BROKEN = {
    "a missing file": ("fla/ops/quasar/gate.py", None, "files", "The file is missing"),
    "no layer": (LAYER, None, "files", "The layer is missing"),
    "forbidden text": (OPERATOR, "\n# import fla.ops.gla\n", "imports", "is forbidden"),
    "a missing import": (
        OPERATOR,
        ("from fla.utils import input_guard", "pass"),
        "imports",
        "input_guard from fla.utils is missing",
    ),
    "a library": ("fla/ops/fast.so", "\0", "compiled files", "fla/ops/fast.so"),
    "a missing module": (
        LAYER,
        "\nimport no_such",
        "import",
        "no_such, which is not installed. Install ",
    ),
    "a fault at its import": (OPERATOR, "\n1 / 0\n", "crash", "ZeroDivisionError"),
    "NaN": (OPERATOR, wrapped("o * float('nan')"), "NaN and Inf", "not finite"),
    "noise": (
        OPERATOR,
        wrapped("o + 8e-5 * o.std() * torch.randn_like(o)"),
        "repeatability",
        "two calls on one input differ",
    ),
    "a wrong scale": (OPERATOR, wrapped("o * 1.01"), "other checks", "relative RMS error"),
}


def judged(tree: Path) -> list[Finding]:
    return list(judge_tree(tree, [512], device="cpu", timeout=HANG))


def test_our_fork_passes_and_is_measured_at_512_tokens(tmp_path: Path) -> None:
    tree = make_fork(tmp_path)
    findings = judged(tree)
    assert [f.text for f in findings if not f.passed] == []
    sample = findings[-1].sample
    assert sample is not None
    assert sample.correctness is not None
    assert sample.correctness.source_digest == sample.source_digest == source_digest(tree)
    assert (sample.length, sample.runs, sample.cache, sample.vram_mb) == (512, 10, "shared", 0)
    assert (sample.source_file, sample.layer_file) == (OPERATOR, LAYER)
    assert sample.tokens_per_sec == pytest.approx(10 * 512 / sample.elapsed_seconds)
    assert sample.environment is not None
    assert sample.environment.device == "cpu"
    assert not list(tree.rglob("__pycache__")), "measuring changed the tree"


@pytest.fixture(scope="module")
def small_fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fork that keeps the rules, with a small honest operator."""
    root = tmp_path_factory.mktemp("small") / "fork"
    never = "if False:\n" + "".join(f"    {line}\n" for line in REQUIRED_IMPORTS)
    files = dict.fromkeys((f"fla/ops/quasar/{name}" for name in TARGET_FILES), "")
    packages = ("fla", "fla/layers", "fla/ops", "fla/ops/quasar")
    files |= dict.fromkeys((f"{name}/__init__.py" for name in packages), "")
    files |= {
        OPERATOR: f"{Path(honest.__file__).read_text()}\n{never}",
        LAYER: "from fla.ops.quasar.chunk import QuasarAttention, chunk_quasar\n",
        "fla/ops/quasar/kernel.cu": "",
    }
    write_files(root, files)
    return root


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_fork_fails_with_the_reason(name: str, small_fork: Path, tmp_path: Path) -> None:
    place, change, failed, reason = BROKEN[name]
    tree = tmp_path / "fork"
    shutil.copytree(small_fork, tree)
    if change is None:
        (tree / place).unlink()
    elif isinstance(change, tuple):
        (tree / place).write_text((tree / place).read_text().replace(*change))
    else:
        with (tree / place).open("a") as file:
            file.write(change)
    wrong = {finding.name: finding.text for finding in judged(tree) if not finding.passed}
    assert failed in wrong
    assert reason in wrong[failed]
