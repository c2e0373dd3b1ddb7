"""The Dockerfile: its commands, in a plain folder and without a registry of images."""

import json
import re
import subprocess

import pytest

from neurons.runtime.errors import EX_CONFIG
from tests import PROJECT
from tests.processes import HANG, run
from tests.scripts.installation.checkout import Checkout

OF_THE_IMAGE = ("apt-get", "useradd")
"""Commands that change the system, which a plain folder lacks."""


def instructions() -> list[tuple[str, str]]:
    """Return the name and the text of each instruction; continued lines are joined."""
    text = (PROJECT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], re.sub(r"\s+#.*", "", line.split(" ", 1)[1])) for line in lines]


def build(checkout: Checkout, **arguments: str) -> None:
    """Run the Dockerfile's commands in the checkout, each with the variables before it."""
    env: dict[str, str] = {}
    for name, text in instructions():
        if name in ("ARG", "ENV"):
            variable, _, value = text.partition("=")
            env[variable] = arguments.get(variable, value)
        elif name == "RUN" and not text.startswith(OF_THE_IMAGE):
            command = ["/bin/sh", "-ec", text]
            done = run(*command, cwd=checkout.root, env=checkout.environment(**env))
            assert done.returncode == 0, (text, done.stderr)


def words_of(name: str) -> list[str]:
    (text,) = [text for found, text in instructions() if found == name]
    return list(json.loads(text))


@pytest.mark.parametrize("gpu", [False, True])
def test_an_image_starts_without_another_installation(checkout: Checkout, *, gpu: bool) -> None:
    checkout.tool("nvidia-smi", "exit 9")
    build(checkout, **({"BUILD": "cuda"} if gpu else {}))
    assert f"build={'cuda' if gpu else 'cpu'}" in checkout.stamp()
    assert checkout.builds() == 1
    if gpu:  # only the running container has one
        checkout.tool("nvidia-smi", "echo GPU 0")
    env = checkout.environment()
    command = [*words_of("ENTRYPOINT"), *words_of("CMD")]
    started = subprocess.run(
        command, cwd=checkout.root, env=env, capture_output=True, text=True, timeout=HANG
    )
    assert started.returncode == 0, started.stderr
    assert json.loads(started.stdout)[2] == ["once"]
    assert checkout.builds() == 1


def test_an_unknown_build_is_named(checkout: Checkout) -> None:
    done = checkout.install("miner", BUILD="gpu")
    assert done.returncode == EX_CONFIG
    assert "BUILD=gpu: give cpu or cuda" in done.stderr


def test_every_file_that_git_ignores_for_its_secrets_stays_out_of_the_image() -> None:
    ignored = (PROJECT / ".dockerignore").read_text().split("\n")
    secret = [line.strip("/") for line in (PROJECT / ".gitignore").read_text().split("\n")[:9]]
    for line in secret:
        if line and not line.startswith("#"):
            assert {line, re.sub(r"\.sqlite.*", ".sqlite*", line)} & set(ignored), line
