"""The inference server with a small random Qwen2, over real HTTP."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from neurons.inference_server.__main__ import _validators, run
from neurons.inference_server.app import Limits, ValidatorRequests, create_app
from neurons.inference_server.queue import REMEMBERED, Decodes, Decoding, Full, Generation
from neurons.inference_server.sample import make_model
from neurons.runtime.errors import ConfigError, Postponed
from neurons.runtime.process import STOP_SIGNALS
from neurons.runtime.settings import Settings
from neurons.validator import logits as logits_module
from neurons.validator.logits import LogitVerifier
from neurons.wire.inference_protocol import InferenceReply, InferenceRequest
from neurons.wire.protocol import QueuedSubmission
from neurons.wire.signed_request import SignedRequest, signed_headers
from tests.neurons.live_api import Hotkey
from tests.processes import HANG, started, wait_for
from tests.servers import dripping, serving_app

VOCABULARY = 512
MINER, OTHER = Hotkey("//Alice").hotkey, Hotkey("//Eve").hotkey
LIMITS = Limits(prompt=256, new=600)


@pytest.fixture(scope="module")
def torch() -> Any:
    import torch

    torch.set_num_threads(1)
    return torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, torch: Any) -> Path:
    """A small Qwen2 with random weights, as transformers saves one."""
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


@contextmanager
def serving(load: Callable[[], Decodes], most: int = 4, **options: Any) -> Iterator[str]:
    with serving_app(create_app(Decoding(load, most), "small", "cpu", LIMITS, **options)) as url:
        yield url


@contextmanager
def serving_model(
    folder: Path, change: Callable[[Any], object] = lambda model: None
) -> Iterator[str]:
    """Serve the model of a folder after `change`; yield the address once it is loaded."""
    from neurons.inference_server.model import Decoder, load_model

    def load() -> Decodes:
        model = load_model(str(folder), "cpu", "auto")
        change(model)
        return Decoder(model)

    with serving(load) as url:
        wait_until(url, "healthy")
        yield url


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", timeout=HANG)


def wait_until(url: str, status: str) -> None:
    wait_for(lambda: get(url, "/health").json()["status"] == status)


def queued(url: str) -> int:
    return round(float(get(url, "/metrics").text.split("\ninference_waiting ")[1].split()[0]))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving_model(folder) as url:
        yield url


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/inference", json=body, timeout=HANG)


def test_the_reply_matches_a_pass_without_a_cache(url: str, folder: Path, torch: Any) -> None:
    """Every token has the largest logit of a pass over the whole text without a cache."""
    from transformers import AutoModelForCausalLM

    prompt = torch.randint(0, VOCABULARY, (130,), generator=torch.Generator().manual_seed(3))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for step in (1, 2, 17, 40):
        reply = post(url, prompt=prompt.tolist(), gen_len=40, logits_at_step=step).json()
        tokens = torch.tensor(reply["tokens"])
        with torch.no_grad():
            plain = model(torch.cat([prompt, tokens])[None]).logits[0, 129:-1]
        chosen = plain.gather(1, tokens[:, None])[:, 0]
        assert float((plain.amax(1) - chosen).max()) < 1e-3
        logits = torch.tensor(reply["captured_logits"])
        assert float((logits - plain[step - 1]).abs().max()) < 1e-3
        assert logits.std() > 1.0
    again = post(url, prompt=prompt.tolist(), gen_len=40, logits_at_step=40).json()
    assert {**again, "elapsed_sec": 0} == {**reply, "elapsed_sec": 0}
    assert post(url, prompt=[1], gen_len=2).json()["captured_logits"] is None


def test_health_model_info_and_metrics(url: str) -> None:
    assert get(url, "/health").json() == {
        "status": "healthy",
        "model_name": "small",
        "device": "cpu",
    }
    info = get(url, "/model_info").json()
    assert (info["vocab_size"], info["max_prompt_tokens"]) == (VOCABULARY, LIMITS.prompt)
    assert post(url, prompt=[1], gen_len=2).status_code == 200
    assert 'inference_requests_total{outcome="answered"}' in get(url, "/metrics").text
    assert queued(url) == 0


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": [], "gen_len": 1}, 422, "prompt"),
        ({"prompt": [1], "gen_len": 0}, 422, "gen_len"),
        ({"prompt": [1], "gen_len": 601}, 422, "gen_len is more than 600"),
        ({"prompt": [1] * 257, "gen_len": 1}, 422, "more than 256 tokens"),
        ({"prompt": [VOCABULARY], "gen_len": 1}, 422, "not below 512"),
        ({"prompt": [-1], "gen_len": 1}, 422, "prompt"),
        ({"prompt": 1}, 422, "prompt: Input should be a valid array; gen_len: Field required"),
        ({"prompt": [1], "gen_len": 5, "logits_at_step": 6}, 422, "more than gen_len"),
        ({"prompt": [1], "gen_len": 5, "logits_at_step": 0}, 422, "logits_at_step"),
        ({"prompt": [1] * 600_000, "gen_len": 1}, 413, "larger than"),
    ],
)
def test_invalid_requests_are_rejected(url, body, status, words):
    reply = post(url, **body)
    assert reply.status_code == status
    assert words in reply.text
    assert post(url, prompt=[1], gen_len=1).status_code == 200


class Slow:
    """Decodes until the request is cancelled."""

    device, vocabulary, longest = "cpu", 10, 10**6

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        self.release = threading.Event()

    def generate(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        capture_at: int | None = None,
        cancelled: Callable[[], bool] = bool,
    ) -> Generation:
        self.begun.set()
        while not cancelled() and not self.release.is_set():
            time.sleep(0.01)
        self.ended.set()
        raise InterruptedError


def test_a_disconnect_ends_the_request_and_a_full_queue_answers_503() -> None:
    decoder = Slow()
    with serving(lambda: decoder, most=1) as url:
        wait_until(url, "healthy")
        head = f"POST /inference HTTP/1.1\r\nHost: a\r\nContent-Length: {len(BODY)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as first:
            first.sendall(head.encode() + BODY)
            assert decoder.begun.wait(HANG)
        assert decoder.ended.wait(HANG)
        decoder.begun.clear()

        def wait() -> None:
            with contextlib.suppress(httpx.HTTPError):
                post(url, prompt=[1], gen_len=1)

        threads = [threading.Thread(target=wait) for _ in range(2)]
        threads[0].start()
        assert decoder.begun.wait(HANG)
        threads[1].start()
        wait_for(lambda: queued(url) == 1)
        refused = post(url, prompt=[1], gen_len=1)
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
        decoder.release.set()


class Broken(Slow):
    def generate(self, *_: Any, **__: Any) -> Generation:
        return Generation([1], [math.nan], 1.0, 1.0)


def test_logits_that_are_not_finite_are_an_error_and_no_answer() -> None:
    with serving(Broken) as url:
        wait_until(url, "healthy")
        reply = post(url, prompt=[1], gen_len=1, logits_at_step=1)
        metrics = get(url, "/metrics").text
    assert (reply.status_code, "not finite" in reply.text) == (500, True)
    assert 'inference_requests_total{outcome="failed"} 1.0' in metrics
    assert 'outcome="answered"' not in metrics


def test_health_shows_loading_and_failed() -> None:
    release = threading.Event()

    def load() -> Decodes:
        release.wait(HANG)
        raise OSError("no such model")

    with serving(load) as url:
        assert get(url, "/health").json()["status"] == "loading"
        refused = post(url, prompt=[1], gen_len=1)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
        assert get(url, "/model_info").status_code == 503
        release.set()
        wait_until(url, "failed")
        assert post(url, prompt=[1], gen_len=1).status_code == 503


def quantise(model: Any) -> None:
    """Round every matrix to 8 bits with one scale per row, as int8 weights are."""
    for weight in model.parameters():
        if weight.ndim > 1:
            step = weight.data.abs().amax(1, keepdim=True) / 127
            weight.data.copy_((weight.data / step).round() * step)


ROW = QueuedSubmission(id=7, miner_hotkey="miner", target_sequence_length=1, created_at="2026")


def verify(reference: str, miner: str, *, final: bool = False) -> Any:
    verifier = LogitVerifier(reference, {"miner": miner}, new_tokens=60)
    found = verifier.verify(ROW, final=final)
    assert found is not None
    # without a reply there is no figure, and nothing is refuted
    assert found.answered or found.verification.cosine_similarity is None
    if "inference server does not answer" in str(found.verification.reason):
        assert not found.answered
    return found.verification


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        (lambda model: None, True),
        (quantise, False),
        (lambda model: model.lm_head.weight.data.mul_(1.05), False),
    ],
)
def test_logits_distinguish_models(url, folder, change, passes):
    with serving_model(folder, change) as miner:
        result = verify(url, miner)
    assert result.verified is passes, result.reason
    assert (result.submission_id, result.throughput > 0) == (7, True)


def test_a_replayed_reply_fails(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The miner's server returns its reply to an earlier prompt."""
    recorded = post(url, prompt=[1, 2, 3], gen_len=60, logits_at_step=5).json()
    real = logits_module._ask

    def answer(address: str, request: Any, *signed: Any) -> Any:
        if address == "https://miner":
            return InferenceReply.model_validate(recorded)
        return real(address, request, *signed)

    monkeypatch.setattr(logits_module, "_ask", answer)
    assert not verify(url, "https://miner").verified


def test_only_the_miners_unreachable_server_fails(url, monkeypatch):
    monkeypatch.setattr(logits_module, "PAUSE_SECONDS", 0.0)
    result = verify(url, "http://127.0.0.1:1")
    assert (result.verified, "does not answer" in result.reason) == (False, True)
    with pytest.raises(Postponed, match="validator's own inference server does not answer"):
        verify("http://127.0.0.1:1", url)
    assert LogitVerifier(url, {}).verify(ROW) is None


BODY = b'{"prompt": [1], "gen_len": 1}'
Send = Callable[[Mapping[str, str]], "Future[httpx.Response]"]


@contextmanager
def busy(decoder: Slow, headers: Mapping[str, str], **options: Any) -> Iterator[tuple[str, Send]]:
    """Serve a decoder that works; yield the address and a function that sends a request."""
    with (
        serving(lambda: decoder, most=16, **options) as url,
        ThreadPoolExecutor(8) as pool,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(decoder.release.set)  # the server ends only when no client waits

        def send(headers: Mapping[str, str]) -> Future[httpx.Response]:
            words: dict[str, Any] = {"content": BODY, "headers": headers, "timeout": HANG}
            return pool.submit(httpx.post, f"{url}/inference", **words)

        wait_until(url, "healthy")
        send(headers)
        assert decoder.begun.wait(HANG)
        yield url, send


def test_a_client_with_many_requests_does_not_block_validators() -> None:
    decoder, key = Slow(), Hotkey("//Bob")
    signed = signed_headers(key, "POST", "/inference", BODY, time.time(), MINER)
    accepted = ValidatorRequests((key.hotkey,), MINER)
    with busy(decoder, {}, signed=accepted) as (url, send):
        for waiting, headers in enumerate(({}, {}, signed), 1):
            send(headers)
            wait_for(lambda: queued(url) == waiting)  # noqa: B023
        for headers in ({}, signed):  # a signature counts only once
            refused = send(headers)
            wait_for(lambda: refused.done() or queued(url) > 3)  # noqa: B023
            assert queued(url) == 3
            assert refused.result(HANG).status_code == 503
    decoding = Decoding(lambda: decoder, 16)
    request = InferenceRequest(prompt=[1], gen_len=1)
    a1, a2, b = [decoding.put(request, client) for client in ("a", "a", "b")]
    with pytest.raises(Full):
        decoding.put(request, "a")
    first = decoding.put(request, "v", reserved=True)
    assert [decoding._take() for _ in range(2)] == [first, a1]
    a3 = decoding.put(request, "a")
    assert [decoding._take() for _ in range(3)] == [b, a2, a3]  # clients take turns


def test_a_validators_request_interrupts_a_long_one() -> None:
    """Otherwise a client keeps validators waiting with requests of the longest prompt and reply."""
    order = []

    class Long(Slow):
        def generate(self, prompt, new_tokens, capture_at=None, cancelled=bool):
            order.append(prompt[0])
            if order == [1]:
                super().generate(prompt, new_tokens, capture_at, cancelled)
            return Generation(list(prompt), None, 0.0, 0.0)

    decoder = Long()
    decoding = Decoding(lambda: decoder, 16)
    decoding.start()
    long = decoding.put(InferenceRequest(prompt=[1], gen_len=1), "a")
    assert decoder.begun.wait(HANG)
    short = decoding.put(InferenceRequest(prompt=[2], gen_len=1), "v", reserved=True)
    assert [one.answer.result(HANG).tokens for one in (short, long)] == [[2], [1]]
    assert order == [1, 2, 1]
    decoding.stop()


def test_the_memory_of_served_clients_is_bounded() -> None:
    decoding, request = Decoding(Slow, 16), InferenceRequest(prompt=[1], gen_len=1)
    for number in range(REMEMBERED + 5):
        decoding.put(request, str(number))
        assert decoding._take()
    assert len(decoding._served) == REMEMBERED


@pytest.mark.parametrize(
    ("named", "miner", "unnamed", "accepted"),
    [
        *((MINER, MINER, False, True), ("", MINER, False, False), ("", MINER, True, True)),
        *((OTHER, MINER, True, False), ("", None, False, False)),
    ],
)
def test_a_signature_counts_only_for_the_miner_that_it_names(named, miner, unnamed, accepted):
    """A miner that a validator checks can send the request on to another miner's server."""
    key, body = Hotkey("//Bob"), b"{}"
    headers = signed_headers(key, "POST", "/inference", body, time.time(), named)
    requests = ValidatorRequests((key.hotkey,), miner, unnamed=unnamed)
    assert requests.accept("/inference", headers, body) is accepted
    assert not requests.accept("/inference", headers, body)


def test_a_validator_names_the_miner_and_signs_no_request_to_its_own_server(url, monkeypatch):
    requests = ValidatorRequests((Hotkey("//Bob").hotkey,), ROW.miner_hotkey)
    sent: list[Mapping[str, str]] = []
    read = logits_module._read

    def noted(
        method: str, address: str, body: bytes | None, kind: Any, headers: Mapping[str, str] = {}
    ) -> Any:
        if method == "POST":
            sent.append(headers)
            accepted.append(requests.accept("/inference", headers, body or b""))
        return read(method, address, body, kind, headers)

    accepted: list[bool] = []
    monkeypatch.setattr(logits_module, "_read", noted)
    servers = {ROW.miner_hotkey: url}
    assert LogitVerifier(url, servers, new_tokens=8, signer=Hotkey("//Bob")).verify(ROW)
    assert accepted == [False, True]
    assert "Signature" not in sent[0]


def test_a_request_that_arrives_twice_at_once_counts_once(monkeypatch) -> None:
    """Both threads compare the nonce before one stores it, unless a lock prevents that."""

    class Nonce(str):
        def __hash__(self) -> int:
            time.sleep(0.05)  # other threads run meanwhile
            return super().__hash__()

        __eq__ = str.__eq__

    def check(*_: object) -> SignedRequest:
        return SignedRequest(MINER, Nonce("a" * 32), 2**40)

    monkeypatch.setattr("neurons.inference_server.app.check_signed_request", check)
    requests = ValidatorRequests((MINER,), MINER)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(requests.accept, "/", {"Hotkey": MINER}, b"") for _ in range(8)]
        assert sum(call.result(HANG) for call in calls) == 1


@pytest.mark.parametrize("trusted", [("127.0.0.1",), ()])
def test_clients_behind_a_trusted_proxy_are_distinguished(trusted: tuple[str, ...]) -> None:
    """Four connections of one client must not use up the places of all others."""
    decoder, one = Slow(), {"X-Forwarded-For": "203.0.113.9"}
    with busy(decoder, one, trusted_proxies=trusted) as (url, send):
        for waiting in (1, 2):
            send(one)
            wait_for(lambda: queued(url) == waiting)  # noqa: B023
        other = send({"X-Forwarded-For": "198.51.100.7"})
        wait_for(lambda: other.done() or queued(url) == 3)
        decoder.release.set()
        assert (other.result(HANG).status_code == 503) is not bool(trusted)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "VALIDATOR_HOTKEYS is empty"),
        ({"validator_hotkeys": (MINER,)}, "the miner's hotkey is unknown"),
        ({"validator_hotkeys": (MINER,), "inference_hotkey": MINER}, None),
        ({"validator_hotkeys": (MINER,), "accept_unnamed_recipients": True}, None),
    ],
)
def test_the_start_warns_if_no_validator_has_priority(tmp_path, settings, words):
    with capture_logs() as logs:
        _validators(Settings(wallet_path=tmp_path, **settings))
    assert [words in one["event"] for one in logs] == ([True] if words else [])


def test_a_busy_server_postpones_the_verification(url, monkeypatch):
    monkeypatch.setattr(logits_module, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(Slow, "vocabulary", VOCABULARY)
    with serving(Slow, most=0) as busy:
        wait_until(busy, "healthy")
        with pytest.raises(Postponed, match="miner's inference server answered with status 503"):
            verify(url, busy)
        assert not verify(url, busy, final=True).verified


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\nX-", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_endless_reply_fails_at_the_deadline(url, begun, monkeypatch):
    """The server sends one byte at a time, of the head or of the body."""
    real, asked = logits_module._ask, []

    def answer(address: str, request: Any, *signed: Any) -> Any:
        asked.append(address)
        if address != url:  # not the reference server
            monkeypatch.setattr(logits_module, "REPLY_SECONDS", 0.5)
        return real(address, request, *signed)

    monkeypatch.setattr(logits_module, "_ask", answer)
    with dripping(begun, b"x") as endless:
        result = verify(url, endless, final=True)
    assert not result.verified
    assert result.reason == "The miner's inference server gave no complete reply within 0.5 s."
    assert len(asked) == 2, "a slow server was asked again, while all evaluations waited"


SERVERS = """
import os, runpy, sys
import neurons.inference_server.app, neurons.inference_server.model  # once, because torch is slow

folders = sys.argv[1:]
for folder in folders:
    pid = os.fork()
    if pid == 0:
        os.environ |= {"NOTIFY_SOCKET": f"{folder}/systemd", "STATE_DIR": f"{folder}/state"}
        sys.argv = ["server", "--port-file", f"{folder}/port"]
        runpy.run_module("neurons.inference_server", run_name="__main__")
    print(pid, flush=True)
codes = dict(os.wait() for _ in folders)
sys.exit(max(codes.values()))
"""
"""Starts a server for each folder, and prints their pids."""


@pytest.mark.usefixtures("hangups")
def test_the_process_serves_a_folder_until_a_signal(folder: Path, tmp_path: Path) -> None:
    given = {"ENV_FILE": os.devnull, "REFERENCE_MODEL": str(folder), "DEVICE": "cpu"}
    given |= {"MINER_INFERENCE_PORT": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = os.environ | given
    places = {tmp_path / number.name: number for number in STOP_SIGNALS}
    with contextlib.ExitStack() as stack:
        notified = []
        for place in places:
            place.mkdir()
            systemd = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            systemd.bind(str(place / "systemd"))
            systemd.settimeout(HANG)
            notified.append(systemd)
        words = ("-c", SERVERS, *map(str, places))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        parent = stack.enter_context(
            started(*words, env=environment, start_new_session=True, **pipes)
        )
        # otherwise the servers keep stdout open after a failure
        stack.callback(kill_group, parent.pid)
        assert parent.stdout is not None
        for systemd, (place, number) in zip(notified, places.items(), strict=True):
            pid = int(parent.stdout.readline())
            assert systemd.recv(100) == b"READY=1"
            url = f"http://127.0.0.1:{int((place / 'port').read_text())}"
            wait_until(url, "healthy")
            assert len(post(url, prompt=[1, 2], gen_len=3).json()["tokens"]) == 3
            os.kill(pid, number)
        assert parent.wait(HANG) == 0
    for place in places:
        assert "inference server listens" in (place / "state/logs/inference.log").read_text()


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def test_a_missing_model_is_a_configuration_error(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    settings = Settings(reference_model=str(tmp_path), device="cpu", miner_inference_port=0)
    with pytest.raises(ConfigError, match=r"REFERENCE_MODEL=.*cannot be loaded"):
        run(settings)
