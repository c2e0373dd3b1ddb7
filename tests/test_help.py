"""`--help` works with the base dependencies only, and has the options that documents use."""

import os
import re
import shlex
from collections import defaultdict

import pytest

from harness.__main__ import _COMMANDS
from tests import PROJECT
from tests.processes import helps_of
from tests.small_fla import install_small_fla
from tests.test_documents import blocks, documents

Line = tuple[str, ...]

INTERNAL = {
    "harness.worker": "the harness starts it with a job on stdin",
    "neurons.miner.alerts": "a child process that posts an alert",
    "harness.tuning": "it names the command that replaces it",
    "neurons.runtime.identity": "a child process that calls the chain",
    "neurons.runtime.child": "runs another module",
    "benchmarks.cases.validator_loop": "a validator's script, as it is",
    "benchmarks.engine.processes": "calls a function for another command",
}
"""Modules that users do not start, and why."""
TORCH_IS_IMPORTED = ("benchmarks", "quasar_kernels.blocks.language")
"""Developers' commands with options that need torch, and an example in one file."""

OPTIONAL = frozenset({"prometheus_client", "psycopg", "pytest"})
HEAVY = {"bittensor", "fla", "torch", "transformers"}
SERVICES = {
    *("alembic", "click", "dotenv", "fastapi", "git", "httpx", "jinja2", "sqlalchemy", "stamina"),
    *("structlog", "uvicorn"),
}
"""Packages of the extras for the miner and the servers, which the library does not need."""
LIBRARY = (
    *("harness", "quasar_kernels", *_COMMANDS),
    *("scripts/step2", "scripts/record", "scripts/gpu"),
)

HIDING = """
import sys


class Hidden:
    names = {names!r}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None


sys.meta_path.insert(0, Hidden())
"""


def modules() -> list[str]:
    """Return every module of the project that `python -m` starts, unless it is internal."""
    found = []
    for root in ("harness", "neurons", "quasar_kernels", "benchmarks"):
        for path in sorted((PROJECT / root).rglob("*.py")):
            if "overlay" not in path.parts and '\nif __name__ == "__main__":' in path.read_text():
                name = ".".join(path.relative_to(PROJECT).with_suffix("").parts)
                found.append(name.removesuffix(".__main__"))
    return [name for name in found if name not in INTERNAL]


def cases() -> list[str]:
    files = sorted((PROJECT / "benchmarks/cases").glob("*.py"))
    return [path.stem for path in files if "\ndef measure(" in path.read_text()]


def documented(document: str) -> list[Line]:
    """Return the Python commands of a document's shell blocks, without the interpreter."""
    found = []
    for block in blocks(document):
        if block.language not in ("", "sh", "bash", "console"):
            continue
        for line in block.source.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ").split("  #")[0]
            if re.match(r"(\.venv/bin/)?python (-m (?!tests\.|pytest)|scripts/)", words):
                found.append(tuple(shlex.split(words)[1:]))
    return found


def without_options(words: Line) -> Line:
    """Return the program of a command, with its subcommand if there is one."""
    named = 2 if words[0] == "-m" else 1
    subcommand = words[named : named + 1]
    return words[:named] + tuple(word for word in subcommand if re.fullmatch(r"[a-z_]+", word))


def hidden_for(line: Line) -> frozenset[str]:
    """Return the packages that a command must not need for its help."""
    hidden = OPTIONAL
    if not any(word.startswith(TORCH_IS_IMPORTED) for word in line):
        hidden = hidden | HEAVY
    if any(word.startswith(LIBRARY) for word in line):
        hidden = hidden | SERVICES
    return hidden


DOCUMENTED = sorted({words for document in documents() for words in documented(document)})
SCRIPTS = [f"scripts/{path.name}" for path in sorted((PROJECT / "scripts").glob("*.py"))]
GROUPS: dict[frozenset[str], list[Line]] = defaultdict(list)
"""Commands by the packages that they must not need; each group runs in one process."""
for _line in dict.fromkeys(
    (
        *((script,) for script in SCRIPTS),
        *(("-m", "harness", command) for command in _COMMANDS),
        *(("-m", module) for module in modules()),
        *(("-m", "benchmarks", case) for case in cases()),
        *map(without_options, DOCUMENTED),
    )
):
    GROUPS[hidden_for(_line)].append(_line)


@pytest.mark.parametrize("hidden", GROUPS, ids=lambda hidden: f"without {len(hidden)} packages")
def test_help_needs_only_the_base_dependencies(hidden, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDING.format(names=set(hidden)))
    before = {path.name for path in PROJECT.iterdir()}
    small_fla = install_small_fla(tmp_path / "fla")
    paths = os.pathsep.join([str(tmp_path), small_fla, str(PROJECT)])
    shown = helps_of(GROUPS[hidden], env={**os.environ, "PYTHONPATH": paths})
    helps = dict(zip(GROUPS[hidden], shown, strict=True))
    for line, text in helps.items():
        assert text.lower().startswith("usage: "), (line, text)
        if line[:2] == ("-m", "benchmarks") and len(line) > 2:
            assert text.startswith(f"usage: python -m benchmarks {line[2]} "), text
    assert {path.name for path in PROJECT.iterdir()} == before
    for words in DOCUMENTED:
        text = helps.get(without_options(words), "")  # of a command of this group
        for option in (word for word in words if text and word.startswith("--")):
            assert re.search(rf"{option}\b", text), f"{' '.join(words)}: no {option} in\n{text}"
