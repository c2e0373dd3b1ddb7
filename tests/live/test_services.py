"""The public API's copy is mended only where it does not compile, and only by indentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.services import mend_api

BROKEN = """\
try:
    with open("/dev/null") as file:
        if False:
            text = "one"
    else:
        text = file.read()
        # an empty file
except OSError:
    text = "none"
"""


def _code(folder: Path, text: str) -> Path:
    (folder / "validator_api").mkdir()
    (folder / "validator_api" / "app.py").write_text(text)
    return folder


def test_an_else_outside_its_with_is_indented(tmp_path: Path) -> None:
    assert "lines 5 to 7" in mend_api(_code(tmp_path, BROKEN))
    mended = (tmp_path / "validator_api" / "app.py").read_text()
    names: dict[str, object] = {}
    exec(mended, names)  # noqa: S102 - the text above
    assert names["text"] == ""
    assert mended.split() == BROKEN.split()


def test_what_compiles_stays_as_it_is(tmp_path: Path) -> None:
    assert mend_api(_code(tmp_path, "text = 1\n")) == ""
    assert (tmp_path / "validator_api" / "app.py").read_text() == "text = 1\n"


def test_any_other_mistake_is_left_to_a_person(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError):
        mend_api(_code(tmp_path, "x = = 1\n"))
