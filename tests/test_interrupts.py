"""Ctrl-C while a command imports its modules or runs: exit status 130, and no traceback."""

import os
import signal
import subprocess

import pytest

from tests.processes import HANG, run_python, started, wait_for

BLOCK = """
import os, sys, time
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["BLOCKED"]:
            open(os.environ["REACHED"], "w").close()
            while True:  # a signal just before a sleep does not end the sleep
                time.sleep(0.1)
sys.meta_path.insert(0, Block())
"""
"""A module that Python imports at its start; it makes the import of another module hang."""


@pytest.mark.parametrize(
    ("command", "blocked"),
    [
        ("neurons.miner", "click"),
        ("neurons.validator", "click"),
        ("neurons.validator_api", "click"),
        ("neurons.inference_server", "click"),
        ("neurons.embedded", "click"),
        ("harness", "pydantic"),
        ("quasar_kernels.blocks.language", "torch"),
    ],
)
def test_ctrl_c_during_the_imports_ends_a_command_quietly(tmp_path, command, blocked):
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    reached = tmp_path / "reached"
    variables = {"PYTHONPATH": str(tmp_path), "BLOCKED": blocked, "REACHED": str(reached)}
    pipe = subprocess.PIPE
    with started(
        "-m", command, "--help", env=os.environ | variables, stdout=pipe, stderr=pipe
    ) as child:
        wait_for(reached.exists, child)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=HANG) == ("", "")
        assert child.returncode == 130


def test_ctrl_c_lets_a_running_command_clean_up() -> None:
    ended = run_python(
        "-c",
        "import signal\n"
        "from quasar_kernels import interrupts\n"
        "def main():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    finally:\n"
        "        print('cleaned up')\n"
        "interrupts.exit_on_ctrl_c()\n"
        "interrupts.run(main)\n",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "cleaned up\n", "")
