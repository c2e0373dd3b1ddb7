"""One cycle in each mode against the public code at the paths in QUASAR_LIVE_* (README.md)."""

import os
from pathlib import Path

import pytest

from tests.live.__main__ import MOMENTS, main

NEEDED = ("QUASAR_LIVE_SUBNET", "QUASAR_LIVE_FORK", "QUASAR_LIVE_PYTHON")

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not all(os.environ.get(name) for name in NEEDED), reason=f"needs {', '.join(NEEDED)}"
    ),
]


@pytest.mark.parametrize("mode", sorted(MOMENTS))
def test_a_cycle_agrees_with_the_public_database(mode: str, tmp_path: Path) -> None:
    subnet, fork, python = (os.environ[name] for name in NEEDED)
    places = ["--subnet", subnet, "--fork", fork, "--python", python]
    assert main([*places, "--mend-api", "--mode", mode, "--keep", str(tmp_path)]) == 0
