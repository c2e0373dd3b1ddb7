"""The commands of the public subnet's README, deployment guide and start scripts, as written."""

import shlex
import sys

import pytest

from neurons.runtime.errors import EX_CONFIG
from tests import PROJECT
from tests.neurons.miner.miner_command import BARE
from tests.processes import run_python

NO_AXON = "--axon.port is ignored: this program serves no axon"
NO_MODEL = "is ignored: no language model writes kernels"
WALLET = "--wallet.name miner --wallet.hotkey default"
VALIDATOR = "--wallet.name validator --wallet.hotkey default"

TAKEN = {
    f"neurons/miner.py {WALLET} --subtensor.network finney --netuid 439 --axon.port 8091 "
    "--logging.info": [NO_AXON],
    f"neurons/miner.py {WALLET} --logging.trace": [],
    f"neurons/miner.py --netuid 1 --subtensor.chain_endpoint ws://127.0.0.1:9946 {WALLET} "
    "--logging.debug": [],
    f"-m neurons.miner --netuid 383 {WALLET} --subtensor.network test --agent-iterations 100 "
    "--target-seq-len 100000 --optimization-interval 300 --model-name Qwen/Qwen3-4B "
    "--logging.debug --use-full-context --context-max-files 50 --context-max-size 200000 "
    "--repo-path ./flash-linear-attention --byoc-file ./chunk.py": [
        "--model-name is ignored: use REFERENCE_MODEL",
        f"--use-full-context {NO_MODEL}",
        f"--context-max-files {NO_MODEL}",
        f"--context-max-size {NO_MODEL}",
        "--byoc-file is ignored: edit quasar_kernels/overlay, or use REPO_PATH",
    ],
    f"neurons/validator.py {VALIDATOR} --subtensor.network finney --netuid 439 --logging.info": [],
    f"-m neurons.validator --netuid 383 {VALIDATOR} --subtensor.network test "
    "--neuron.polling_interval 300 --logging.debug": [],
}
"""Command lines that run, with their warnings."""

REFUSED = {
    f"neurons/validator.py {VALIDATOR} --mock --logging.debug": "--mock",
    f"neurons/miner.py --netuid 383 {WALLET} --network test": "--network",
    f"-m neurons.miner {WALLET} --test-mode": "--test-mode",
}
"""Command lines that end with one sentence about this option."""


def module_of(words: list[str]) -> list[str]:
    """Return the words of a command whose file, by way of its start script, runs a module."""
    if words[0] == "-m":
        return words
    return ["-m", words[0].replace("/", ".").removesuffix(".py"), *words[1:]]


@pytest.mark.parametrize("line", TAKEN)
def test_a_command_of_the_guide_runs_as_written(line: str, tmp_path) -> None:
    words = module_of(shlex.split(line))
    ending = ["status"] if words[1] == "neurons.miner" else ["--version"]
    done = run_python(*words, *ending, env={**BARE, "STATE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == TAKEN[line]


@pytest.mark.parametrize("line", [*TAKEN, *REFUSED])
def test_the_start_script_takes_the_same_options(line: str, tmp_path) -> None:
    file = line.split()[0]
    words = shlex.split(line)[1:] if file != "-m" else shlex.split(line)[2:]
    file = file if file != "-m" else line.split()[1].replace(".", "/") + ".py"
    env = {**BARE, "PATH": f"{sys.prefix}/bin:{BARE['PATH']}"}
    done = run_python(str(PROJECT / file), *words, "--help", cwd=tmp_path, env=env)
    if line in TAKEN:
        assert (done.returncode, done.stderr) == (0, ""), done
        assert done.stdout.startswith("Usage: ")
    else:
        assert done.returncode == EX_CONFIG
        assert f"There is no option '{REFUSED[line]}'." in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("line", REFUSED)
def test_other_commands_end_with_one_sentence(line: str) -> None:
    done = run_python(*module_of(shlex.split(line)), env=BARE)
    assert done.returncode == EX_CONFIG
    assert f"No such option '{REFUSED[line]}'." in done.stderr
    assert len(done.stderr.splitlines()) == 1
