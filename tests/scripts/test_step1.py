"""scripts/step1_first_optimization.py: the comparison, its table and its plot."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import step1_first_optimization as step1

from harness.measuring.runner import MeasurementError
from quasar_kernels.contract import LAYER_FILE, OVERLAY, QUASAR_DIR
from tests.harness import samples
from tests.repositories import make_checkout

FORK = {str(LAYER_FILE): "class QuasarAttention: ...\n", f"{QUASAR_DIR}/chunk.py": "slow = True\n"}


def timer(tree: Path, length: int, *_: Any, **options: Any) -> Any:
    operator = (tree / QUASAR_DIR / "chunk.py").read_bytes()
    assert not options["cross_check"]
    faster = 3.0 if operator == (OVERLAY / QUASAR_DIR / "chunk.py").read_bytes() else 1.0
    return samples.make_sample(length, faster * length)


@pytest.mark.parametrize("setup", ["--skip-setup", "--upstream", "the guide's clone"])
def test_both_trees_are_timed_and_plotted(tmp_path, monkeypatch, capsys, setup):
    monkeypatch.chdir(tmp_path)
    by_guide = setup == "the guide's clone"
    name = "quasar_work/flash-linear-attention" if by_guide else "clone"
    fork, out = make_checkout(tmp_path / name, FORK), "step1" if by_guide else "found"
    arguments = {
        "--skip-setup": ["--skip-setup", "--fork", str(fork), "--out", out],
        "--upstream": ["--fork", "new", "--upstream", fork.as_uri(), "--out", out],
    }.get(setup, ["--upstream", "file:///nonexistent"])
    checked: list[int] = []

    def checker(tree: Path, length: int, *_: Any, **__: Any) -> Any:
        checked.append(length)
        return samples.make_correctness(
            passed=(tree / LAYER_FILE).read_text() != FORK[str(LAYER_FILE)]
        )

    arguments += ["--lengths", "512, 1024", "--blocks", "5"]
    assert step1.main(arguments, timer=timer, checker=checker) == 0
    assert checked == [1024]
    assert (
        "| 1,024 | 1,024 | 3,072 | 3.000 | 3.000 to 3.000 | 1.000 |"
        in Path(f"{out}.md").read_text()
    )
    printed = capsys.readouterr().out
    assert "correctness check: passed" in printed
    assert not by_guide or f"using the fork in {name}" in printed
    drawn = ElementTree.parse(f"{out}.svg").getroot()  # noqa: S314 # our own file
    assert float(drawn.get("width", "inf")) <= 830  # the width of a README on GitHub
    texts = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"public fork", "these kernels"} <= texts


def test_a_fork_that_cannot_be_timed_is_replaced_by_a_copy(tmp_path, capsys):
    fork = make_checkout(tmp_path / "clone", FORK)

    def times_only_kernels(tree: Path, length: int, *_: Any, **options: Any) -> Any:
        if tree == fork:
            raise MeasurementError("it needs a GPU", "crash")
        return timer(tree, length, **options)

    out, green = tmp_path / "found", lambda *_, **__: samples.make_correctness()
    arguments = ["--skip-setup", "--fork", str(fork), "--lengths", "512", "--out", str(out)]
    assert step1.main(arguments, timer=times_only_kernels, checker=green) == 0
    assert "cannot time the public fork: crash: it needs a GPU" in capsys.readouterr().out
    text = out.with_suffix(".md").read_text()
    assert "public fork" not in text
    assert "| 512 | 1,536 | 1,536 | 1.000 |" in text


def test_wrong_kernels_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fork = make_checkout(tmp_path / "clone", FORK)
    arguments = ["--skip-setup", "--fork", str(fork), "--out", str(tmp_path / "found")]
    red = samples.make_correctness(passed=False)
    assert step1.main(arguments, timer=timer, checker=lambda *_, **__: red) == 1
    assert "FAILED" in capsys.readouterr().out
    assert not (tmp_path / "found.md").exists()


def test_missing_forks_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert step1.main(["--skip-setup", "--fork", str(tmp_path)]) == 1
    assert f"does not contain {LAYER_FILE}" in capsys.readouterr().err
    assert step1.main(["--fork", str(tmp_path)]) == 1
    assert "--skip-setup" in capsys.readouterr().err
    assert step1.main(["--fork", str(tmp_path / "x"), "--upstream", "file:///nonexistent"]) == 1
    assert "cannot be cloned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "512,2O48"], "512,2O48"),  # before, such parts were left out
        (["--out", "/proc/none/x"], "/proc/none/x.md cannot be written"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        step1.main(arguments)
    assert message in capsys.readouterr().err
