"""The fork's rules: the overlay keeps them, and every broken rule is found."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path, PurePosixPath

import pytest

from quasar_kernels.contract import (
    FORBIDDEN_TEXT,
    LAYER_FILE,
    OVERLAY,
    QUASAR_DIR,
    REQUIRED_IMPORTS,
    TARGET_FILES,
    check_tree,
    compiled_files,
    copy_overlay,
    overlay_digest,
    overlay_files,
)
from tests import PROJECT
from tests.processes import run_python
from tests.repositories import write_files

SPECIFIED = """
    import torch
    import torch.nn.functional as F
    import triton
    import triton.language as tl
    from fla.ops.utils.index import prepare_chunk_indices
    from fla.ops.quasar.forward_substitution import forward_substitution_kernel
    from fla.utils import IS_AMD
    from fla.utils import autocast_custom_bwd
    from fla.utils import autocast_custom_fwd
    from fla.utils import autotune_cache_kwargs
    from fla.utils import check_shared_mem
    from fla.utils import input_guard
"""
"""The imports as the rule book prints them."""


def test_the_rules_equal_the_rule_book_s():
    assert list(REQUIRED_IMPORTS) == [line.strip() for line in SPECIFIED.strip().splitlines()]
    forbidden = {f"{word} fla.ops.{name}" for word in ("from", "import") for name in ("gla", "kda")}
    assert set(FORBIDDEN_TEXT) == forbidden
    names = "chunk chunk_intra_token_parallel forward_substitution fused_recurrent gate"
    assert list(TARGET_FILES) == [f"{name}.py" for name in names.split()]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copy_overlay(OVERLAY, tmp_path)
    return tmp_path


def test_the_overlay_keeps_every_rule(tree):
    assert check_tree(OVERLAY, strict=True) == []
    assert check_tree(tree) == []


def test_every_published_source_names_licence_and_copyright_holders():
    licence = (PROJECT / "LICENSE").read_text().splitlines()
    assert licence[0] == "MIT License"
    (holders,) = [line.removeprefix("Copyright (c) ") for line in licence if "(c)" in line]
    marks = {".py": "#", ".cu": "//", ".cuh": "//"}
    sources = [path for path in overlay_files() if path.suffix in marks]
    assert len(sources) > 50
    for path in sources:
        mark, text = marks[path.suffix], (OVERLAY / path).read_text()
        names = f"{mark} SPDX-FileCopyrightText: {holders}\n{mark} SPDX-License-Identifier: MIT\n"
        # at the end, so that line numbers in compiled kernels stay
        assert text.endswith(f"\n{names}"), path


def test_all_files_but_byte_code_are_published(tmp_path):
    names = "notes.txt", "left.pyc", "program.cu", "__pycache__/cache.txt"
    write_files(tmp_path, dict.fromkeys(names, ""))
    assert list(map(str, overlay_files(root=tmp_path))) == ["notes.txt", "program.cu"]


def test_the_scope_ops_publishes_only_the_operator_s_folder():
    files = overlay_files("ops")
    assert {QUASAR_DIR / name for name in TARGET_FILES} <= set(files)
    layers = {PurePosixPath(f"fla/layers/{name}.py") for name in ("quasar", "quasar_adaptive")}
    assert set(overlay_files()) - set(files) == layers


def test_the_digest_depends_on_names_and_contents_of_a_scope_s_files(tree):
    digests = [overlay_digest(root=tree)]
    assert digests == [overlay_digest()]
    operator = overlay_digest("ops", tree)
    layer, gate = tree / "fla/layers/quasar.py", tree / QUASAR_DIR / "gate.py"

    layer.write_text(layer.read_text() + "# changed\n")
    digests.append(overlay_digest(root=tree))
    assert overlay_digest("ops", tree) == operator

    gate.rename(gate.with_name("gates.py"))
    digests.append(overlay_digest(root=tree))
    gate.write_text("")
    digests.append(overlay_digest(root=tree))
    assert len(set(digests)) == len(digests)


# neither a comment nor a longer line nor a string counts as the import
MISSING = ["# {0}\n{0}_of_another_name", '"""\n{0}\n"""']
PRESENT = ["{0}  # needed", "{0}#1 of 2 # more"]


@pytest.mark.parametrize("form", [*MISSING, *PRESENT])
def test_forms_of_a_required_import(tree, form):
    chunk = tree / QUASAR_DIR / "chunk.py"
    text = chunk.read_text()
    for line in REQUIRED_IMPORTS:
        assert f"\n{line}\n" in text
        text = text.replace(f"\n{line}\n", f"\n{form.format(line)}\n", 1)
    chunk.write_text(text)
    found = [str(violation) for violation in check_tree(tree, strict=True)]
    assert len(found) == (len(REQUIRED_IMPORTS) if form in MISSING else 0)
    for line in REQUIRED_IMPORTS if form in MISSING else ():
        assert sum(repr(line) in each for each in found) == 1, line


@pytest.mark.parametrize(
    ("name", "text"), [*zip(TARGET_FILES, cycle(FORBIDDEN_TEXT), strict=False)]
)
def test_forbidden_text_in_a_comment(tree, name, text):
    with (tree / QUASAR_DIR / name).open("a") as file:
        file.write(f"\n# was: {text} import x\n")
    (violation,) = check_tree(tree)
    assert violation.path == QUASAR_DIR / name
    assert text in str(violation)


@pytest.mark.parametrize(
    "code",
    [
        "from  fla.ops.gla import chunk_gla",
        "from fla.ops import (\n    gla as g,\n)",
        "from ..gla import chunk",
        "from .. import kda",
        "import fla . ops . kda . chunk as c",
        "def late():\n    import importlib\n    return importlib.import_module('fla.ops.gla')",
    ],
)
def test_forbidden_imports_in_any_spelling(tree, code):
    helper = tree / QUASAR_DIR / "cuda" / "helper.py"
    depth = code.replace("from ..", "from ...")  # the same module from one folder below
    for path, text in ((tree / QUASAR_DIR / "gate.py", code), (helper, depth)):
        before = path.read_text() if path.exists() else ""
        path.write_text(f"{before}\n{text}\n")
        (violation,) = check_tree(tree)
        assert violation.path == PurePosixPath(path.relative_to(tree))
        assert "forbidden" in violation.rule
        path.write_text(before)


@pytest.mark.parametrize("coding", ["latin-1", "utf-7"])
def test_forbidden_imports_in_any_encoding(tree, coding):
    text = "# caf\xe9 \nimport fla.ops.gla\n".encode(coding)
    if coding == "utf-7":
        text = b"# +AAo-import fla.ops.gla\n"  # Python reads a line break, UTF-8 a comment
    (tree / QUASAR_DIR / "helper.py").write_bytes(b"# coding: " + coding.encode() + b"\n" + text)
    (violation,) = check_tree(tree)
    assert "forbidden" in violation.rule


def test_python_with_a_byte_order_mark_and_folders_that_look_like_python(tree):
    chunk = tree / QUASAR_DIR / "chunk.py"
    chunk.write_bytes(b"\xef\xbb\xbf" + chunk.read_bytes())
    (tree / QUASAR_DIR / "folder.py").mkdir()
    assert check_tree(tree) == []


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("gate.py", None, "missing"),
        ("gate.py", b"\xff\xfe\x00", "UTF-8"),
        ("helper.py", b"#" * 2**21, None),
        ("helper.py", b"#" * (2**21 + 1), "too long"),
        *(
            ("helper.py", text, "not Python")
            for text in (b"(" * 100_000, b"-" * 500_000 + b"1", b"x = \x00")
        ),
    ],
    ids=lambda x: "" if isinstance(x, bytes) else x,
)
def test_files_that_cannot_be_read(tree, name, content, rule):
    file = tree / QUASAR_DIR / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    violations = check_tree(tree)
    assert {v.path for v in violations} == ({QUASAR_DIR / name} if rule else set())
    assert not rule or any(rule in v.rule for v in violations)
    assert not any(": ." in v.rule for v in violations)  # a reason without a text


@pytest.mark.parametrize("name", [QUASAR_DIR / "layer/paths.py", LAYER_FILE])
def test_a_syntax_error_has_its_file_and_line(tree, name):
    write_files(tree, {str(name): "x = 1\ndef f(:\n"})
    (violation,) = check_tree(tree)
    assert violation.path == name
    assert f"({name.name}, line 2)" in violation.rule, violation.rule


def test_the_layer_may_import_other_operators(tree):
    (tree / LAYER_FILE).write_text("import fla.ops.gla\n")
    assert check_tree(tree) == []


def test_compiled_files_are_found_in_all_folders(tree):
    names = {"fla/__pycache__/a.cpython-311.pyc", "docs/lib.so.1", "fla/ops/x.cubin"}
    write_files(tree, dict.fromkeys(names, ""))
    assert {str(path) for path in compiled_files(tree)} == names


def test_a_tree_without_cuda_source_or_layer(tree):
    for path in tree.rglob("*.cu"):
        path.unlink()
    (tree / "fla/layers/quasar.py").unlink()
    (tree / ".git").mkdir()
    (tree / ".git" / "kernel.cu").write_text("files of git do not count")
    assert [str(v.path) for v in check_tree(tree, strict=True)] == [
        "fla/layers/quasar.py",
        "fla/ops/quasar",
    ]


def test_the_check_imports_no_torch():
    code = "import sys, quasar_kernels.contract as c; c.check_tree(c.OVERLAY); print(*sys.modules)"
    done = run_python("-c", code, check=True)
    assert not {"torch", "triton", "fla"} & set(done.stdout.split())
