"""The proxy in front of a real HTTP server: it forwards, records and injects faults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from tests.live.faults import FAULTS, IN_A_ROW, OVERSIZE_BYTES, Fault, FaultPlan
from tests.live.proxy import Proxy, Record
from tests.processes import HANG
from tests.servers import Handler, Server, serving

BROKEN = ("dropped before", "reply dropped", "truncated", "carried out late")
"""Faults that break the connection."""
OTHER = {"redirect": 302}
"""Statuses of replaced replies that are not in the fault's name."""


class _Upstream(Handler):
    """Stores the bodies of POSTs, and answers with their number."""

    stored: list[bytes]
    seen: list[dict[str, str]]

    def serve(self) -> None:
        body = self.read_body()
        self.seen.append(dict(self.headers))
        if body:
            self.stored.append(body)
        answer = json.dumps({"path": self.path, "stored": len(self.stored)}).encode()
        headers = {"Content-Type": "application/json", "Date": self.date_time_string()}
        self.send(200, answer, headers)


class _Only(FaultPlan):
    """Gives every request the same fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(0)
        self._fault = fault

    def draw(self, method: str, route: str) -> Fault:
        return self._fault


@pytest.fixture
def upstream() -> Iterator[tuple[str, type[_Upstream]]]:
    """The address of a server, and its handler, which stores bodies and headers."""
    handler = type("Handler", (_Upstream,), {"stored": [], "seen": []})
    server = Server(handler)
    with serving(server):
        yield server.url, handler


def _post(proxy: Proxy, route: str = "/submit_kernel") -> httpx.Response:
    with httpx.Client(base_url=proxy.url, trust_env=False, timeout=HANG) as client:
        return client.post(route, json={"a": 1}, headers={"Hotkey": "h", "Signature": "s"})


def test_requests_are_forwarded_and_recorded_without_secrets(upstream) -> None:
    url, server = upstream
    with Proxy(url) as proxy:
        reply = _post(proxy, "/commit_submission?limit=3")
        assert reply.json() == {"path": "/commit_submission?limit=3", "stored": 1}
        assert json.loads(server.stored[0]) == {"a": 1}
        assert {"Hotkey": "h", "Signature": "s"}.items() <= server.seen[0].items()
        assert proxy.records == [Record("POST", "/commit_submission", True, 200, None)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_has_the_effect_of_its_name(upstream, fault):
    url, server = upstream
    with Proxy(url, _Only(replace(fault, delay=fault.delay / 100))) as proxy:
        try:
            reply = _post(proxy)
        except httpx.HTTPError:
            assert fault.name in BROKEN
        else:
            number = re.match("[345][0-9][0-9]", fault.name)
            assert reply.status_code == int(number[0] if number else OTHER.get(fault.name, 200))
            assert (len(reply.content) > OVERSIZE_BYTES) == (fault.name == "oversized")
            if fault.name == "garbled":
                with pytest.raises(json.JSONDecodeError):
                    reply.json()
        assert len(server.stored) == fault.forwarded
        status = 200 if fault.forwarded else None
        record = Record("POST", "/submit_kernel", fault.forwarded, status, fault.name)
        assert proxy.records == [record]


def test_a_plan_is_reproducible_and_limits_faults_in_a_row() -> None:
    def drawn(seed: int) -> list[str | None]:
        plan = FaultPlan(seed, post_share=1.0)
        faults = (plan.draw("POST", "/x") for _ in range(40))
        return [fault.name if fault else None for fault in faults]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {FaultPlan(1, ["429"], post_share=1.0).draw("POST", "/").name} == {"429"}  # type: ignore[union-attr]
    passed = [index for index, name in enumerate(drawn(1)) if name is None]
    assert passed == list(range(IN_A_ROW, 40, IN_A_ROW + 1))
