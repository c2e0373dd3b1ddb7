"""The client of GitHub's REST API against a real HTTP server: token, fork, limits, refusals."""

import re
import threading

import pytest

from neurons.miner.publishing.github import check_token, ensure_fork, web_address
from neurons.runtime.errors import ConfigError, Held, Retry
from tests.neurons.githost import CANARY, UPSTREAM, Answer, GitHub

FORK = "flash-linear-attention"
DATE = "Mon, 02 Feb 2026 02:40:00 GMT"  # 1770000000
USED_UP = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1770000120"}


def ensure(host: GitHub, **options: object) -> str:
    arguments: dict[str, object] = {"first_wait": 0.01, **options}
    return ensure_fork(host.url, UPSTREAM, "miner", FORK, CANARY, **arguments)  # type: ignore[arg-type]


def requests(host: GitHub) -> list[str]:
    return [line for line, _ in host.seen]


def test_an_existing_fork_is_found_and_none_is_requested(host: GitHub) -> None:
    host.scopes = None  # as for a fine-grained token
    host.fork(f"miner/{FORK}")
    assert ensure(host) == f"{host.url}/miner/{FORK}.git"
    assert not [line for line in requests(host) if line.startswith("POST")]


def test_row_34_a_fork_is_requested_once_and_polled(host: GitHub) -> None:
    host.polls_until_made = 4
    assert ensure(host) == f"{host.url}/miner/{FORK}.git"
    assert requests(host).count(f"POST /repos/{UPSTREAM}/forks") == 1
    assert requests(host).count(f"GET /repos/miner/{FORK}") == 1 + 4 + 1


def test_a_fork_without_a_default_branch_is_not_ready(host: GitHub) -> None:
    host.fork(f"miner/{FORK}", default_branch=None)
    with pytest.raises(Retry, match="still creating"):
        ensure(host, patience=0.05)
    host.repositories[f"miner/{FORK}"]["default_branch"] = "main"
    assert ensure(host)


def test_a_stop_ends_the_wait(host: GitHub) -> None:
    host.polls_until_made = 1000
    stop = threading.Event()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    with pytest.raises(Retry, match="Stopped"):
        ensure(host, stop=stop, first_wait=3600.0)
    timer.join()


def test_a_fork_of_the_same_network_is_accepted(host: GitHub) -> None:
    root = {"full_name": "fla-org/flash-linear-attention"}
    host.repositories[UPSTREAM].update(fork=True, parent=root, source=root)
    host.fork(f"miner/{FORK}", parent=root, source=root)
    assert ensure(host)


def rename_fork(host: GitHub) -> None:
    made = {"full_name": "miner/fla-old", "default_branch": "main"}
    host.script[f"POST /repos/{UPSTREAM}/forks"] = [Answer(202, made)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda host: host.add(f"miner/{FORK}"), "not a fork of .* Set GITHUB_FORK_NAME"),
        (rename_fork, "GITHUB_FORK_NAME=fla-old"),
        (lambda host: host.fork(f"miner/{FORK}", archived=True), "archived"),
        (lambda host: host.fork(f"miner/{FORK}", permissions={"push": False}), "may not push"),
        (lambda host: host.repositories.clear(), "GITHUB_UPSTREAM"),
        (lambda host: host.fork(f"miner/{FORK}", clone_url="https://evil.example/"), "other host"),
        (lambda host: setattr(host, "login", "somebody"), "to somebody, and GITHUB_USERNAME"),
    ],
)
def test_a_fork_that_cannot_be_used_is_held_with_a_remedy(host, change, words):
    change(host)
    with pytest.raises(Held) as held:
        ensure(host)
    assert re.search(words, str(held.value))


@pytest.mark.parametrize("scopes", ["", "gist, read:org"])
def test_row_28_a_classic_token_without_the_scope_is_held_at_once(host, scopes):
    host.scopes = scopes
    with pytest.raises(Held) as held:
        ensure(host)
    assert "public_repo" in held.value.remedy
    assert "Contents: read and write" in held.value.remedy
    assert requests(host) == ["GET /user"]


def test_a_wrong_token_is_held_and_not_shown(host: GitHub) -> None:
    wrong = "expired-" + CANARY
    with pytest.raises(Held, match="does not accept") as held:
        check_token(host.url, wrong, "miner")
    assert wrong not in str(held.value)


@pytest.mark.parametrize(
    ("answer", "after"),
    [
        (Answer(429, {}, {"Retry-After": "7"}), 7),
        (Answer(403, {"message": "secondary rate limit"}, {"Retry-After": "30"}), 30),
        (Answer(403, {"message": "API rate limit exceeded"}, {**USED_UP, "Date": DATE}), 120),
        (Answer(429, {}, {"Retry-After": "Mon, 02 Feb 2026 02:41:00 GMT", "Date": DATE}), 60),
        (Answer(429, {}, {"Retry-After": "999999"}), 3600),
        (Answer(502, b"<html>bad gateway</html>"), None),
        (Answer(503, {}, {"Retry-After": "5"}), 5),
    ],
)
def test_row_28_the_pause_after_limits_and_outages_follows_github(host, answer, after):
    host.script["GET /user"] = [answer]
    with pytest.raises(Retry) as retry:
        ensure(host)
    assert retry.value.after == after
    assert ensure(host)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (Answer(403, {"message": "Resource not accessible by token"}), "public_repo"),
        (Answer(422, {"message": "Name already exists"}), "by hand"),
        (Answer(301, {}, {"Location": "https://evil.example/"}), "GITHUB_UPSTREAM"),
    ],
)
def test_refusals_have_a_remedy(host: GitHub, answer: Answer, word: str) -> None:
    host.script[f"POST /repos/{UPSTREAM}/forks"] = [answer]
    with pytest.raises(Held) as held:
        ensure(host)
    assert word in held.value.remedy


@pytest.mark.parametrize("body", [b"<html>", b"[]"])
def test_a_reply_other_than_an_object_is_a_temporary_fault(host: GitHub, body: bytes) -> None:
    host.script["GET /user"] = [Answer(200, body)]
    with pytest.raises(Retry, match="not a JSON object"):
        ensure(host)


def test_a_github_out_of_reach_is_a_temporary_fault() -> None:
    with pytest.raises(Retry, match="cannot be reached"):
        check_token("http://127.0.0.1:9", CANARY, "miner")


def test_the_token_is_only_sent_over_https() -> None:
    with pytest.raises(ConfigError, match="GITHUB_API_URL"):
        check_token("http://github.example", CANARY, "miner")


def test_the_web_address_of_an_api() -> None:
    assert web_address("https://api.github.com") == "https://github.com"
    assert web_address("https://git.example/api/v3") == "https://git.example"
