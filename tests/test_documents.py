"""The examples of the documents run as they stand, and their commands know the options they name.

A Python block that begins with an import is pasted alone by a reader, so it runs in a fresh
namespace; one without continues the block before. `<!-- example: needs a GPU -->` before a block
keeps it from running here: it is compiled, and what it imports of this project must be there.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

from tests import PROJECT
from tests.processes import run_python

NEEDS_GPU = "<!-- example: needs a GPU -->"
SHELLS = ("", "sh", "bash", "console")
RUNNER = """\
import json, sys
for name, line, source in json.load(sys.stdin):
    if source.startswith(("import ", "from ")):
        space = {"__name__": "example"}
    exec(compile("\\n" * line + source, name, "exec"), space)
"""


class Block(NamedTuple):
    """A block of code of a document."""

    document: str
    line: int
    language: str
    source: str
    needs_gpu: bool


def documents() -> list[str]:
    found = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    # a template's links are those of the page in docs/results that is made from it
    return [name for name in found.stdout.split() if "/templates/" not in name]


@cache
def blocks(document: str) -> list[Block]:
    found, before = [], ""
    for token in MarkdownIt().parse((PROJECT / document).read_text()):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            language = token.info.split(" ")[0]
            marked = before == NEEDS_GPU
            found.append(Block(document, token.map[0] + 1, language, token.content, marked))
        before = token.content.strip() if token.type == "html_block" else ""
    return found


def python_blocks(document: str) -> list[Block]:
    return [block for block in blocks(document) if block.language == "python"]


@pytest.mark.slow
@pytest.mark.parametrize("document", [d for d in documents() if python_blocks(d)])
def test_examples_run_as_they_stand(document):
    runnable = [(b.document, b.line, b.source) for b in python_blocks(document) if not b.needs_gpu]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(runnable),
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


GPU_BLOCKS = [block for document in documents() for block in blocks(document) if block.needs_gpu]


@pytest.mark.slow
@pytest.mark.parametrize("block", GPU_BLOCKS, ids=lambda b: f"{b.document}:{b.line}")
def test_examples_for_a_gpu_compile_and_their_imports_are_there(block):
    tree = ast.parse(block.source, block.document)
    ours = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quasar_kernels")
    ]
    assert ours
    source = "\n".join(map(ast.unparse, ours))
    done = run_python("-c", source)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", documents())
def test_python_is_marked_as_such(document):
    for block in blocks(document):
        if block.language != "python":
            imports = re.search(r"^ *(import|from) \w", block.source, re.MULTILINE)
            assert not imports, f"{document}:{block.line} is not marked as python"


def commands(document: str) -> list[list[str]]:
    """Return the Python commands of a document's shell blocks, without the interpreter."""
    found = []
    for block in blocks(document):
        if block.language not in SHELLS:
            continue
        for line in block.source.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ").split("  #")[0]
            if re.match(r"(\.venv/bin/)?python (-m (?!tests\.)|scripts/)", words):
                found.append(shlex.split(words)[1:])
    return found


COMMANDS = sorted({tuple(words) for document in documents() for words in commands(document)})


@cache
def help_of(words: tuple[str, ...]) -> str:
    done = run_python(*words, "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_know_their_options(words):
    named, rest = (2, words[2:]) if words[0] == "-m" else (1, words[1:])
    subcommand = tuple(words[:named])
    if rest and re.fullmatch(r"[a-z]+", rest[0]):
        subcommand = (*subcommand, rest[0])
    said = help_of(subcommand)
    for option in (word for word in rest if word.startswith("--")):
        assert re.search(rf"{option}\b", said), f"{' '.join(subcommand)} has no {option}:\n{said}"


def test_local_links_lead_somewhere():
    for document in documents():
        text = (PROJECT / document).read_text()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", text):
            if not target.startswith(("http:", "https:", "mailto:")):
                place = (PROJECT / document).parent / target
                assert Path(place).exists(), f"{document} links to {target}"
