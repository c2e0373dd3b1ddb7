"""The examples in documents run; links and tests that documents name exist.

A Python block that begins with an import runs in a new namespace; another block continues the one
before. A block after `<!-- example: needs a GPU -->` is compiled, and its imports from this project
are executed. Each document has a process of its own.
"""

import ast
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

from tests import PROJECT
from tests.processes import run, run_python
from tests.small_fla import install_small_fla

NEEDS_GPU = "<!-- example: needs a GPU -->"
RUNNER = """\
import json, os, sys, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fla warns on a CPU
    import fla.ops, torch._dynamo, triton  # once for all documents: the examples take less time
failures = 0
for blocks in json.load(sys.stdin):
    if os.fork() == 0:
        for name, line, source in blocks:
            if source.startswith(("import ", "from ")):
                space = {"__name__": "example"}
            exec(compile("\\n" * line + source, name, "exec"), space)
        os._exit(0)  # an ordinary end takes two seconds
    failures += os.wait()[1] != 0
sys.exit(failures)
"""


class Block(NamedTuple):
    """A block of code of a document."""

    document: str
    line: int
    language: str
    source: str
    needs_gpu: bool


def documents() -> list[str]:
    found = run("git", "ls-files", "*.md", check=True)
    # a template's links are relative to the page in docs/results that is generated from it
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


def imports_of(block: Block) -> Block:
    """Return the imports from this project of a block that needs a GPU, which must compile."""
    imports = [
        node
        for node in ast.parse(block.source, block.document).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quasar_kernels")
    ]
    assert imports, block
    return block._replace(source="\n".join(map(ast.unparse, imports)))


@pytest.mark.slow
def test_examples_run(tmp_path):
    work = []
    for document in filter(python_blocks, documents()):
        examples = [imports_of(b) if b.needs_gpu else b for b in python_blocks(document)]
        work.append([(b.document, b.line, b.source) for b in examples])
    assert work
    path = os.pathsep.join([install_small_fla(tmp_path), "."])
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    environment["OMP_NUM_THREADS"] = "1"  # spinning threads would slow down other tests
    done = run_python("-c", RUNNER, input=json.dumps(work), env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_local_links_exist():
    for document in documents():
        text = (PROJECT / document).read_text()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", text):
            if not target.startswith(("http:", "https:", "mailto:")):
                place = (PROJECT / document).parent / target
                assert Path(place).exists(), f"{document} links to {target}"


def test_the_tests_that_the_security_page_names_exist():
    table = re.findall(r"^\|.*\|.*\|(.*)\|$", (PROJECT / "SECURITY.md").read_text(), re.MULTILINE)
    names = [name for cell in table for name in re.findall(r"`(\w+)`", cell)]
    tests = run("git", "grep", "-hoE", "def test_\\w+", "--", "tests", check=True).stdout
    files = run("git", "ls-files", "tests", check=True).stdout
    assert len(names) > 10
    assert not [name for name in names if name not in tests + files]


def test_each_row_of_the_fault_table_has_tests_with_its_number():
    page = (PROJECT / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| (\d\d) \|", page, re.MULTILINE)
    tests = run("git", "grep", "-hoE", "^def test_row_[0-9]{2}_", "--", "tests", check=True).stdout
    assert rows == [f"{row:02}" for row in range(1, 36)]
    assert set(re.findall("test_row_(..)_", tests)) == set(rows)
