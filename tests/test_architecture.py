"""ARCHITECTURE.md's picture of the folders is the tree, and no folder is too full to take in."""

from __future__ import annotations

import re
from collections import Counter

from tests import PROJECT

CODE = {".py", ".cu", ".cuh", ".sh", ".js", ".service"}
MOST = 12
PICTURE = (PROJECT / "ARCHITECTURE.md").read_text().partition("## Folders")[2].partition("\n## ")[0]


def drawn() -> dict[str, str]:
    """Return the folders of the picture by their paths, with what is said of each."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for indent, name, said in re.findall(r"^ {4}( *)([\w/]+)/ +(\S.*)$", PICTURE, re.M):
        above = [(depth, path) for depth, path in above if depth < len(indent)]
        path = "/".join((*(path for _, path in above[-1:]), name))
        above.append((len(indent), path))
        found[path] = said
    return found


def files() -> Counter[str]:
    """Return how many files of code each folder holds, below the picture's outermost ones."""
    outermost = {PROJECT / one.partition("/")[0] for one in drawn()}
    found = [path for one in outermost for path in one.rglob("*") if path.suffix in CODE]
    return Counter(path.parent.relative_to(PROJECT).as_posix() for path in found)


def test_the_picture_names_every_folder_of_code_and_no_other() -> None:
    named, held = drawn(), set(files())
    of_tests = {one for one in held if one.startswith("tests/")}
    assert not held - of_tests - set(named)
    assert not {one for one in named if one != "docs" and not (PROJECT / one).is_dir()}
    # tests lie in folders like those of the code, which are not drawn twice
    packages = {one.partition("/")[0] for one in named}
    for one in of_tests - set(named):
        second = one.split("/")[1]
        assert second in packages or f"tests/{second}" in named, one


def test_no_folder_holds_more_files_than_a_reader_takes_in() -> None:
    assert not {folder: count for folder, count in files().items() if count > MOST}
