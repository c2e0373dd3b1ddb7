"""The client against a real HTTP server: retries, credentials, redirects, clocks, limits."""

import contextlib
import shutil
import socket
import ssl
import threading
import time
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from neurons.miner.command_line import doctor
from neurons.miner.publishing import github
from neurons.runtime.errors import ConfigError, Held, Retry
from neurons.runtime.settings import Settings
from neurons.wire import client as client_module
from neurons.wire import connection, outcomes
from neurons.wire.client import ApiClient, Limiter
from neurons.wire.protocol import MarkValidatedRequest, Message
from tests.neurons.fake_validator_api import RESET, FakeValidatorApi, Fault, serve
from tests.neurons.miner.parts import HOTKEY, Key
from tests.neurons.wire.api_calls import CLAIM, COMMITMENT, ROUTES, SIGNED, every_call
from tests.processes import HANG
from tests.servers import dripping, free_port, make_certificate

pytestmark = pytest.mark.usefixtures("quick_retries")


def test_credentials_are_sent_only_to_signed_routes(client, fake_api):
    for call in every_call(client).values():
        with contextlib.suppress(Held, Retry):
            call()
    assert {r.path for r in fake_api.requests} == set(ROUTES)
    for request in fake_api.requests:
        signed = request.path in SIGNED
        assert ("signature" in request.headers) is signed
        assert request.headers.get("hotkey") == (HOTKEY if signed else None)
        if signed:
            assert request.headers["signature"] == Key().sign(HOTKEY)


@pytest.mark.parametrize(
    ("status", "outcome", "requests"),
    [
        (408, outcomes.ReplyLost, 3),
        (429, outcomes.Busy, 1),
        (500, outcomes.ServerFault, 3),
        (503, outcomes.Busy, 1),
    ],
)
def test_server_faults_are_retried_for_get_but_not_for_post(
    client, fake_api, status, outcome, requests
):
    for route, count in (("/get_current_round", requests), ("/reveal_submission", 1)):
        fake_api.faults[route].extend([Fault(status, "no")] * count)
        with pytest.raises(outcome, match=str(status)):
            every_call(client)[route]()
        assert fake_api.count(route) == count


def test_a_refused_read_says_nothing_about_a_submission(client, fake_api):
    for route, outcome in (
        ("/get_current_round", outcomes.ReadRefused),
        ("/reveal_submission", outcomes.RevealRefused),
        ("/commit_submission", outcomes.Refused),
    ):
        fake_api.faults[route].append(Fault(400, "no"))
        with pytest.raises(outcome, match="400: no"):
            every_call(client)[route]()
        assert fake_api.count(route) == 1
    assert not issubclass(outcomes.ReadRefused, outcomes.Refused)


NGINX = b"""<html>
<head><title>404 Not Found</title></head>
<body><center><h1>404 Not Found</h1></center><hr><center>nginx/1.22.1</center></body>
</html>"""


def test_row_10_a_foreign_page_leaves_the_submission_uncertain(client, fake_api):
    for route, call in every_call(client).items():
        fake_api.faults[route].append(Fault(404, NGINX))
        with pytest.raises(outcomes.ForeignPage, match="VALIDATOR_API_URL") as caught:
            call()
        assert "<html>" not in caught.value.reason
        assert "answered 404: 404 Not Found (" in caught.value.reason


def test_lost_replies_are_retried_for_get_and_never_for_post(client, fake_api):
    fake_api.registered.add(HOTKEY)
    for route, call in every_call(client).items():
        fake_api.faults[route].extend([RESET] * 3)
        with pytest.raises(outcomes.ReplyLost):
            call()
        assert fake_api.count(route) == (1 if route in SIGNED else 3)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_row_07_a_request_that_was_never_sent_is_unreachable(host: str) -> None:
    scheme = "http" if host == "127.0.0.1" else "https"
    client = ApiClient(f"{scheme}://{host}:{free_port()}", Key())
    with pytest.raises(outcomes.Unreachable):
        client.commit(*COMMITMENT)


def test_row_07_a_retry_after_date_counts_on_the_servers_clock(fake_api: FakeValidatorApi) -> None:
    later = {"Retry-After": formatdate(time.time() + 100_000, usegmt=True)}
    fake_api.faults["/commit_submission"].append(Fault(503, "", later))
    with serve(fake_api) as url:
        client = ApiClient(url, Key(), now=lambda: time.time() - 7200)
        with pytest.raises(outcomes.Busy) as caught:
            client.commit(*COMMITMENT)
    assert float(caught.value.after or 0) == pytest.approx(100_000, abs=HANG)


def test_row_11_a_redirect_is_not_followed(client: ApiClient, fake_api: FakeValidatorApi) -> None:
    elsewhere = FakeValidatorApi()
    with serve(elsewhere) as other:
        to = {"Location": f"{other}/commit_submission"}
        fake_api.faults["/commit_submission"].append(Fault(307, "", to))
        with pytest.raises(outcomes.ForeignPage, match="redirects are not followed") as caught:
            client.commit(*COMMITMENT)
    assert other in caught.value.reason
    assert elsewhere.requests == []


@pytest.mark.parametrize(
    "address",
    ["http://api.example", "ftp://127.0.0.1", "https://user:word@api.example", "api.example", ""],
)
def test_row_11_an_unsafe_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="VALIDATOR_API_URL"):
        ApiClient(address, Key())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_row_11_an_untrusted_certificate_gets_no_credential(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*make_certificate(tmp_path, "/CN=localhost"))

    def shake(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the test has ended
                return
            with contextlib.suppress(OSError):
                context.wrap_socket(connection, server_side=True)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=shake, args=(listener,), daemon=True).start()
        address = f"https://localhost:{listener.getsockname()[1]}"
        client = ApiClient(address, Key())
        with pytest.raises(outcomes.Untrusted, match="not trusted"):
            client.commit(*COMMITMENT)
        (finding,) = doctor.api(Settings(validator_api_url=address))
        assert "its certificate is not trusted: self-signed certificate" in finding.detail


DRIPS = {
    "informational replies": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "a header": (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "a body in chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nn\r\n"),
    "a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
}


@pytest.mark.parametrize(("first", "drop"), DRIPS.values(), ids=DRIPS)
def test_row_07_an_endless_reply_is_cut_off(first, drop, monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(github, "MAX_REQUEST_SECONDS", 0.1)
    with dripping(first, drop) as url:
        link, failures = connection.Connection(url, Key(), reply_seconds=0.1), []

        def send() -> None:
            for request in (
                lambda: link.exchange("GET", "/get_current_round", Message),
                lambda: github.check_token(url, "ghp_x", "me"),
            ):
                try:
                    request()
                except Retry as fault:
                    failures.append(fault)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        sender.join(HANG)
    assert [type(one) for one in failures] == [outcomes.ReplyLost, Retry]


def test_nan_is_never_sent(client, fake_api):
    with pytest.raises(ValueError, match="finite number"):
        client.submit(2048, {**CLAIM, "tokens_per_sec": float("nan")}, 1)
    unchecked = MarkValidatedRequest.model_construct(score=float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        client.exchange("POST", "/submit_kernel", Message, body=unchecked)
    assert fake_api.requests == []


@pytest.mark.parametrize(("ahead", "warnings"), [(0, 0), (20, 0), (3600, 1), (-3600, 1)])
def test_row_12_one_warning_for_a_wrong_clock(fake_api, ahead, warnings):
    with serve(fake_api) as url, capture_logs() as logs:
        client = ApiClient(url, Key(), now=lambda: time.time() - ahead)
        for _ in range(2):
            client.current_round()
        assert client.clock_offset == pytest.approx(ahead, abs=5)
    assert sum("clock" in row["event"] for row in logs) == warnings


def test_the_limiter_allows_nine_requests_in_any_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def wait(seconds: float) -> None:
        clock[0] += seconds

    limit = Limiter(9, wait, lambda: clock[0])
    sent = []
    for _ in range(40):
        clock[0] += 0.5
        limit()
        sent.append(clock[0])
    for first in range(len(sent) - 9):
        assert sent[first + 9] - sent[first] >= 60


def test_requests_to_loopback_are_not_limited() -> None:
    waits: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"current_block": 1, "pending_reveals": []})

    for address in ("https://api.example", "http://127.0.0.1"):
        transport = httpx.MockTransport(answer)
        client = ApiClient(address, Key(), transport=transport, wait=waits.append)
        for _ in range(client_module.REQUESTS_A_MINUTE + 1):
            client.pending_reveals()
    assert len(waits) == 1
    assert 55 < waits[0] <= 60
