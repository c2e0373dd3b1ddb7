"""A PostgreSQL server of one's own ends with whoever started it."""

from __future__ import annotations

import subprocess

import pytest

from neurons.embedded import postgresql
from neurons.runtime.errors import ConfigError
from tests.processes import is_alive, started, wait_for

PARENT = """
from tests.postgresql import serve_or_skip
import time
with serve_or_skip() as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(postgresql.find_programs() is None, reason="PostgreSQL is not installed")
def test_no_server_outlives_a_killed_parent() -> None:
    with started("-c", PARENT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        assert is_alive(server)
        parent.kill()
        parent.wait()
        wait_for(lambda: not is_alive(server))


def test_without_a_server_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "find_programs", lambda: None)
    with pytest.raises(ConfigError, match="apt install postgresql"), postgresql.serve():
        pass
