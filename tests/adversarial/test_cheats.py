"""Cheating and wrong kernels: the harness must refuse each for the right reason."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import PROJECT
from tests.harness.conftest import HONEST, write_tree

FOLDER = Path(__file__).with_name("cheats")
TOKENS = 256
IDLE = "the timed calls did not compute the layer"
DIGESTS = f"{IDLE}: digests"

OPERATORS = {
    "wrong_decay": "operator: relative RMS error",
    "reads_the_future": "operator: past outputs that see the future",
    "mutates_its_input": "operator: inputs changed (k",
    "leaves_its_tail_unwritten": "operator: relative RMS error",
    "lower_precision": "operator: relative RMS error",
    "another_dtype": "operator: outputs of another dtype",
    "another_shape": "operator: outputs of another shape",
    "skips_its_last_chunk": "operator: error of the worst eighth",
    "forgets_between_chunks": "operator: relative RMS error",
    "forgets_what_new_layers_forget": "operator of slow heads: relative RMS error",
    "overflows": "operator: largest difference",
    "returns_no_state": "final state: missing",
    "wrong_state": "final state: relative RMS error",
    "ignores_the_initial_state": "operator: relative RMS error (257 tokens, from an initial state)",
    "wrong_for_one_head": "operator: relative RMS error",
    "wrong_on_repeated_keys": "operator on repeated keys: relative RMS error",
    "wrong_behind_a_burst": "operator behind a burst",
    "knows_the_checks_lengths": "operator: relative RMS error",
    "remembers_by_address": "inputs overwritten in place",
    "remembers_by_version": "inputs overwritten in place",
    "writes_into_one_buffer": "operator: earlier outputs changed",
    "never_the_same_twice": "operator: two calls on one input differ",
    "writes_later": "operator: relative RMS error",
}
LAYERS = {
    "WithoutItsGate": "layer: relative RMS error",
    "ChangesItsWeights": "layer: weights changed (g_proj.1.bias)",
    "WithoutGradients": "gradients: cosine (k_",
    "WithWrongGradients": "gradients: cosine (v_",
    "ReplaysItsFirstOutput": "input overwritten in place",
    "ScribblesOnItsInput": "layer: inputs changed (x",
    "SkipsTheConvolution": "layer: relative RMS error",
}
RESTING = ("RestsWhileTimed", "RemembersByVersion", "RemembersByContent")
PARTLY = ("ComputesOnlyTheBeginning", "ZeroesAChunk", "KnowsItsProcess", "ReusesOutputsByAddress")
TIMED = {
    **dict.fromkeys((*RESTING, "ComputesWhenRead", "ForgesItsTime"), IDLE),
    **dict.fromkeys(PARTLY, DIGESTS),
    "PatchesTheClock": "replaced time.time",
    "PatchesSynchronize": "replaced torch.cuda.synchronize",
}
WRONG_DIGESTS = (
    *("ForgesItsDigests", "ForgesByBatches", "ForgesByHalves", "ForgesByALoop"),
    *("ForgesAPreparedChain", "ForgesEveryOtherCall", "ForgesOneCallInFour", "ForgesByWindows"),
    *("ForgesAllButTheLast", "PreparesItsProjections", "KeepsItsWeights", "LeavesChannelsOut"),
    *("LeavesTokensOut", "ComputesInBfloat16", "DropsSmallFactors"),
)
PROVEN = {**dict.fromkeys(WRONG_DIGESTS, DIGESTS), "ForgesSolvedDigests": "digests: size"}
SLOW = ("Slow", "ForgesTheClock", "ForgesItsFirstCalls", "StartsTrivial")
"""Layers whose calls take at least 30 ms; no change of their process must raise their speed."""
LENGTHS = {
    "ForgesByHalves": 32,  # it computes a hundred calls in each chain
    # a stall of the host in its ten short timed calls must not make them as slow as honest ones
    "RemembersByContent": 1024,
    **dict.fromkeys(("ComputesOnlyTheBeginning", "ZeroesAChunk", "ForgesByWindows"), 512),
}
"""Lengths in tokens of cheats that need another one than TOKENS."""
CHEATS = [
    *(("check", "operators", name, 64) for name in OPERATORS),
    *(("check", "layers", name, 64) for name in LAYERS),
    *(("time", "timed", name, LENGTHS.get(name, TOKENS)) for name in TIMED),
    *(("prove", "proven", name, LENGTHS.get(name, TOKENS)) for name in PROVEN),
]
REASONS = {**OPERATORS, **LAYERS, **TIMED, **PROVEN}
HONEST_TASKS = ("check", "time", "prove")


def make_tree(root: Path, module: str, name: str) -> Path:
    """Write a fork with the kernel `name` of a module in `cheats`."""
    files = {source.name: source.read_text() for source in FOLDER.glob("*.py")}
    files["honest.py"] = f"{HONEST}\n{files['honest.py']}"
    part = "QuasarAttention" if name[0].isupper() else "chunk_quasar"
    files["chunk.py"] = (
        "from fla.ops.quasar import honest\n"
        f"from fla.ops.quasar.{module} import {name}\n"
        f"honest.{part} = {name}\n"
        "from fla.ops.quasar.honest import QuasarAttention, chunk_quasar\n"
    )
    if name.startswith("Forges"):  # these patch the harness when they are subclassed
        files["chunk.py"] += f"class QuasarAttention({name}): pass\n"
    return write_tree(root, {f"fla/ops/quasar/{file}": text for file, text in files.items()})


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The verdicts on all cheats, and on the honest kernel by each task."""
    folder = tmp_path_factory.mktemp("cheats")
    honest = make_tree(folder / "honest", "honest", "right")
    slow = [("prove", "proven", name, TOKENS) for name in SLOW]
    names = [*HONEST_TASKS, *(name for _, _, name, _ in [*CHEATS, *slow])]
    work = [[task, str(honest), 64 if task == "check" else TOKENS] for task in HONEST_TASKS]
    for task, module, name, length in [*CHEATS, *slow]:
        work.append([task, str(make_tree(folder / name, module, name)), length])
    done = subprocess.run(
        [sys.executable, "-m", "tests.adversarial.arena", "time"],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        cwd=PROJECT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(names, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("task", HONEST_TASKS)
def test_the_honest_kernel_passes(verdicts: dict[str, str], task: str) -> None:
    assert verdicts[task] == "" if task == "check" else verdicts[task].startswith("passed")


@pytest.mark.parametrize("name", SLOW)
def test_the_subject_cannot_raise_its_measured_speed(verdicts: dict[str, str], name: str) -> None:
    speed = re.fullmatch(r"passed: (\S+) tokens/s", verdicts[name])
    assert speed is not None, verdicts[name]
    assert float(speed[1]) < 1.01 * TOKENS / 0.03  # the link is subtracted


@pytest.mark.parametrize("name", [name for _, _, name, _ in CHEATS])
def test_row_26_a_cheat_is_refused_for_the_right_reason(verdicts, name):
    assert REASONS[name] in verdicts[name], verdicts[name] or "not refused"
