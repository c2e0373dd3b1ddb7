"""The HTML pages, over real HTTP and through a browser's parser."""

import re
from base64 import b64decode

import httpx
import pytest
import structlog
from selectolax.lexbor import LexborHTMLParser, LexborNode
from sqlalchemy import event

from neurons.validator_api.competition.rounds import utc
from neurons.validator_api.database.storage import DatabaseAway, Storage
from neurons.validator_api.database.tables import Submission
from neurons.validator_api.pages import leaderboard
from tests.neurons.live_api import (
    ALICE,
    BLOCKS,
    BOB,
    VALIDATOR,
    Hotkey,
    LiveApi,
    commitment,
    revelation,
)
from tests.postgresql import on_both

CAROL = Hotkey("//Carol")
SALT = "salt-canary"
SECRET_FORK = "https://github.com/alice/not-yet-public"
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></bdi><style>*{display:none}</style>",
    "{{ 7 * 7 }} &lt;b&gt; \u202egnp.exe",
)
TAGS = {
    *("html", "head", "meta", "title", "link", "body", "header", "nav", "main", "h1", "h2"),
    *("p", "a", "bdi", "dl", "dt", "dd", "div", "span", "table", "thead", "tbody", "tr", "th"),
    *("td", "img", "footer", "time"),
}
"""The elements of a submission's page."""

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


class Page:
    """A page as a browser parses it."""

    def __init__(self, api: LiveApi, path: str, status: int = 200) -> None:
        self.reply = api.http.get(path, headers=BROWSER)
        assert self.reply.status_code == status
        assert self.reply.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in self.reply.headers["content-security-policy"]
        self.tree = LexborHTMLParser(self.reply.text)

    @property
    def text(self) -> str:
        return " ".join(self.tree.root.text(separator=" ").split()) if self.tree.root else ""

    def all(self, selector: str) -> list[LexborNode]:
        return self.tree.css(selector)

    def texts(self, selector: str) -> list[str]:
        return [" ".join(node.text().split()) for node in self.all(selector)]

    def rows(self, table: int = 0) -> list[list[str]]:
        body = self.all("tbody")[table]
        return [
            [" ".join(cell.text().split()) for cell in row.css("th, td")] for row in body.css("tr")
        ]

    def fact(self, name: str) -> str:
        terms = {one.text(): one for one in self.all("dt")}
        value = terms[name].next
        while value is not None and value.tag != "dd":
            value = value.next
        assert value is not None
        return " ".join(value.text().split())


def judge(api: LiveApi, row: int, score: float, reason: str = "", **more: object) -> None:
    body = {"submission_id": row, "score": score, "reason": reason, **more}
    api.judge("/mark_validated", body)


def test_before_the_first_round_and_for_unknown_addresses(api: LiveApi) -> None:
    assert Page(api, "/").texts("h1") == ["Leaderboard"]
    assert "No round has begun" in Page(api, "/rounds").text
    for path in ("/rounds/1", "/submissions/1", f"/submissions/{10**9}"):
        assert Page(api, path, 404).texts("h1") == ["Not Found"]
    for text in ("-1", "1e3", "x%00", "9" * 30):
        for path in (f"/rounds/{text}", f"/submissions/{text}", f"/rounds?before={text}"):
            assert Page(api, path, 422)


@on_both
def test_the_leaderboard_shows_ranking_and_time_left(api: LiveApi) -> None:
    api.register(BOB)
    slow = api.submit(ALICE, 4000.0, target=1_000_000)
    fast = api.submit(BOB, 15_000.0)
    wrong = api.submit(BOB, 9e9, target=200_000)
    api.submit(ALICE, 1.0, target=300_000)  # waits
    judge(api, slow, 1.0)
    judge(api, fast, 0.95)
    judge(api, wrong, 0.0, "The kernels fail the correctness check.")
    api.clock.now += 3600 * 2.5
    page = Page(api, "/")
    assert page.texts("h1") == ["Round 1"]
    facts = [page.fact(name) for name in ("Time left", "Submissions", "In the queue")]
    assert facts == ["1 d 21 h", "4", "1"]
    assert [[row[0], row[2], row[3], row[4]] for row in page.rows()] == [
        ["1", "1M", "12,000", "60%"],
        ["2", "100k", "7,125", "25%"],  # 95% of the claim were measured
    ]
    # Narrow screens show the league below the miner, not in its column.
    miners = [row[1].split("#")[1] for row in page.rows()]
    assert miners == [f"{slow} 1M", f"{fast} 100k"]
    verdicts = [(row[0], row[3]) for row in page.rows(2)]
    assert verdicts[:2] == [(f"#{wrong}", "rejected"), (f"#{fast}", "confirmed")]
    speeds = {row[0]: row[2] for row in page.rows(1)}
    assert (speeds["1M"], speeds["100k"]) == ("4,124", "24,743")  # 12,000 by 3%
    for path in ("/rounds", "/rounds/1", "/submissions/1", "/submissions/3"):
        assert Page(api, path).text


def test_a_submission_shows_its_speeds_and_the_verdict(api: LiveApi) -> None:
    claimed = {
        "512": {"tokens_per_sec": 300.0},
        "2048": {"tokens_per_sec": 800.0},
        "100000": {"tokens_per_sec": 4000.0},  # the claim, which the miner repeats
    }
    row = api.submit(ALICE, 4000.0, benchmarks=claimed)
    page = Page(api, f"/submissions/{row}")
    assert page.fact("State") == "waiting for a validator"
    assert page.fact("Submitted") == f"{utc(api.clock.now):%Y-%m-%d %H:%M} UTC"
    api.clock.now += 3600.0
    reason = "Rejected: 3,000 tokens/s measured, 4,000 claimed (75% of the claim)."
    measured = {"100000": {"tokens_per_sec": 3000.0}}
    judge(api, row, 0.0, reason, measured=measured, device="NVIDIA H200")
    page = Page(api, f"/submissions/{row}")
    assert (page.fact("State"), page.texts(".reason")) == ("rejected", [reason])
    facts = [page.fact(name) for name in ("Validator", "Measured on", "Judged")]
    assert facts == [VALIDATOR.hotkey, "NVIDIA H200", f"{utc(api.clock.now):%Y-%m-%d %H:%M} UTC"]
    assert page.rows() == [
        ["512", "300.0", "–", "–"],
        ["2,048", "800.0", "–", "–"],
        ["100,000", "–", "4,000", "3,000"],
    ]
    (picture,) = page.all("img.plot")
    drawing = b64decode((picture.attributes["src"] or "").partition(",")[2]).decode()
    assert drawing.count("<circle") == 4  # two of the miner, the claim, one of the validator
    names = re.findall(r">(miner|claim|validator)</text>", drawing)
    assert names == ["miner", "claim", "validator"]
    assert ">k tokens/s</text>" in drawing


@pytest.mark.parametrize("speed", [5e-324, 1e10])
def test_any_claim_can_be_drawn(api: LiveApi, speed: float) -> None:
    api.register(ALICE)
    for target, other in ((512, 5e-324), (1024, 1e12)):
        row = api.submit(
            ALICE, speed, target=target, benchmarks={"2048": {"tokens_per_sec": other}}
        )
        assert api.http.get(f"/submissions/{row}").status_code == 200


def test_pages_hide_a_claim_until_its_reveal(api: LiveApi) -> None:
    body = commitment(ALICE, SALT, SECRET_FORK)
    row = int(api.ok("/commit_submission", body, ALICE)["submission_id"])
    pages = [Page(api, path) for path in ("/", "/rounds", "/rounds/1", f"/submissions/{row}")]
    hidden = (SALT, SECRET_FORK, "not-yet", body["commitment_hash"], "100,000", "100k", "127.0.0.1")
    for page in pages:
        assert [word for word in hidden if word in page.reply.text] == []
    assert pages[-1].fact("State") == "committed, hidden until its reveal"
    assert pages[-1].fact("Committed") == f"{utc(api.clock.now):%Y-%m-%d %H:%M} UTC"
    assert pages[-1].fact("Commitment") == f"{body['commitment_hash'][:16]}..."
    assert pages[-1].fact("Opens").endswith(f"in {BLOCKS} blocks")
    api.pass_blocks(BLOCKS)
    api.ok("/reveal_submission", revelation(ALICE, row, SALT, SECRET_FORK), ALICE)
    shown = Page(api, f"/submissions/{row}")
    assert shown.fact("Fork") == SECRET_FORK
    assert SALT not in shown.reply.text


@pytest.fixture
def any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept any text as a fork's address, as servers before 0.2.0 did; pages show their rows."""
    monkeypatch.setattr("neurons.validator_api.auth.check_fork_url", lambda *_, **__: None)


@pytest.mark.usefixtures("any_address")
def test_text_of_miners_is_escaped(api: LiveApi) -> None:
    for text, key in zip(HOSTILE, (ALICE, BOB, VALIDATOR, CAROL), strict=True):
        api.register(key, model=text)
        row = api.submit(key, 5.0, fork=f"https://x.example/{text}")
        judge(api, row, 1.0, text)
        page = Page(api, f"/submissions/{row}")
        assert page.texts(".reason") == ["".join(filter(str.isprintable, text))]
        assert page.fact("Fork") == f"https://x.example/{text}"
        assert text in page.fact("Registered for")
        assert {node.tag or "" for node in page.all("*")} <= TAGS
        attributes = {name for node in page.all("*") for name in node.attributes}
        assert [name for name in attributes if name.startswith("on")] == []
        assert page.texts("title") == [f"Submission {row} · QUASAR competition"]


@pytest.mark.usefixtures("any_address")
def test_only_a_web_address_is_a_link(api: LiveApi) -> None:
    safe = "https://github.com/alice/fork"
    unsafe = ("javascript:alert(1)", "data:text/html,<b>", "https://user:word@host/x", "//host/x")
    for fork in (safe, *unsafe, "https://["):
        page = Page(api, f"/submissions/{api.submit(ALICE, 5.0, fork=fork)}")
        links = [node.attributes["href"] for node in page.all("main dd.code a")]
        assert links == ([fork] if fork == safe else [])
        assert page.fact("Fork") == fork


def test_a_round_that_ends_early_shows_its_actual_end(api: LiveApi) -> None:
    row = api.judged(ALICE, 4000.0)
    api.clock.now += 3600.0
    ended = f"{utc(api.clock.now):%Y-%m-%d %H:%M} UTC"
    api.judge("/finalize_round/1", {})
    api.clock.now += 600.0
    page = Page(api, "/")  # no round is active
    assert page.fact("Ended") == Page(api, "/rounds/1").fact("Ended") == ended
    assert [(one[0], one[4]) for one in page.rows()] == [("1", "60%")]
    assert page.texts("main p strong") == ["2,062"]  # to beat in the next round
    assert Page(api, "/rounds").rows()[0][4] == ended
    api.get("/get_current_round")
    (now, before) = Page(api, "/rounds").rows()
    assert (now[0], now[1], before[0]) == ("Round 2", "–", "Round 1")
    assert before[1].startswith(ALICE.hotkey[:6])
    page = Page(api, "/")
    assert page.texts("h1") == ["Round 2"]
    assert ended in page.text
    scores, last, verdicts = page.rows(0), page.rows(1), page.rows(2)
    assert scores[0] == ["100k", "0.5", "4,124"]  # Alice's claim is of that league
    assert [(one[0], one[3], one[4]) for one in last] == [("1", "2,000", "60%")]
    assert [(one[0], one[4]) for one in verdicts] == [(f"#{row}", "1")]  # of round 1


def test_a_round_that_ends_on_time_keeps_its_planned_end(api: LiveApi) -> None:
    api.submit(ALICE, 4000.0)
    planned = Page(api, "/rounds/1").fact("Ends")
    api.clock.now += 3600 * 50  # no request arrived when it was over
    assert Page(api, "/").texts("h1") == ["Round 2"]
    assert Page(api, "/rounds/1").fact("Ended") == planned


def test_claims_above_the_scores_to_beat_rank_and_earn(api: LiveApi) -> None:
    api.judged(ALICE, 100.0)
    api.judge("/create_round", {})
    keys = [Hotkey(f"//Miner{n}") for n in range(6)]
    for place, key in enumerate(keys[:4]):
        api.judged(key, 1000.0 - 100 * place)
    for speed in (990.0, 980.0):  # the leader's other submissions take no weight from others
        api.judged(keys[0], speed)
    page = Page(api, "/")
    assert page.texts("main p strong") == ["51.6", "360.9", "515.5"]
    league, multiplier, rank, share, lead = page.rows(1)[0]
    assert (league, multiplier, rank, share, lead) == ("100k", "0.5", "103.1", "721.7", "1,031")
    for key, speed, weight in ((keys[4], 103.1, 0.0), (keys[5], 721.7, 0.05)):
        api.judged(key, speed)
        assert dict(api.weights(round_id=2)).get(key.hotkey, 0.0) == weight
        rows = api.get("/get_submission_stats")["top_performers"]
        assert key.hotkey in {row["miner_hotkey"] for row in rows if row["rank"]}


def test_pages_that_can_change_refresh_themselves(api: LiveApi) -> None:
    waiting = api.submit(ALICE, 5.0)
    live = ["/", "/rounds/1", f"/submissions/{waiting}"]
    for path in live:
        page = Page(api, path)
        assert 5 <= float(page.reply.headers["refresh"]) <= 120
        (stop,) = page.all("footer a")
        (updated,) = page.all("footer time")
        assert updated.attributes["datetime"] == f"{utc(api.clock.now).isoformat()}Z"
        paused = Page(api, path + (stop.attributes["href"] or ""))
        assert "refresh" not in paused.reply.headers
        (resume,) = paused.all("footer a")
        resumed = httpx.URL(f"{api.url}{path}").join(resume.attributes["href"] or "")
        assert "refresh" in api.http.get(resumed).headers
    judge(api, waiting, 1.0)
    api.judge("/finalize_round/1", {})
    for path in live[1:]:
        assert "refresh" not in Page(api, path).reply.headers
    assert "refresh" in Page(api, "/").reply.headers  # a round may begin


def test_an_error_is_a_page_for_browsers_and_json_for_programs(api: LiveApi) -> None:
    for method, path, status in (
        *(("GET", path, 404) for path in ("/nothing", "/rounds/7", "/redoc")),
        *(("GET", "/submit_kernel", 405), ("POST", "/rounds", 405)),
        ("GET", "/validation_queue", 401),
        ("GET", "/get_weights?round_id=x", 422),
    ):
        check_error(api, method, path, status)


def check_error(api: LiveApi, method: str, path: str, status: int) -> None:
    # One connection per request: the server closes it after a fault.
    shown = httpx.request(method, api.url + path, headers=BROWSER)
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    tree = LexborHTMLParser(shown.text)
    assert [node.attributes["href"] for node in tree.css("main a")] == ["/"]
    for accepted in ("application/json", "*/*", "", "application/json, text/html;q=0.5"):
        reply = httpx.request(method, api.url + path, headers={"Accept": accepted})
        assert list(reply.json()) == ["detail"]
        assert reply.status_code == shown.status_code == status
        assert reply.headers.get("allow") == shown.headers.get("allow")
    assert shown.headers["cache-control"] == "no-store"
    assert shown.headers["vary"] == "Accept"


@pytest.mark.parametrize(
    ("failure", "status"), [(ZeroDivisionError("canary"), 500), (DatabaseAway("canary"), 503)]
)
def test_a_server_error_is_logged_and_a_page_for_browsers(api, monkeypatch, failure, status):
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(Storage, "read", fail)
    with structlog.testing.capture_logs() as logs:  # structlog takes seconds to print a traceback
        check_error(api, "GET", "/", status)
        shown = httpx.get(api.url, headers=BROWSER)
    assert ("request failed" in [one["event"] for one in logs]) == (status == 500)
    assert "canary" not in shown.text
    assert shown.headers.get("refresh") == shown.headers.get("retry-after")


def test_the_api_page_lists_every_call_and_loads_nothing(api: LiveApi) -> None:
    page = Page(api, "/docs")
    document = api.get("/openapi.json")
    assert "/" not in document["paths"]  # the document has no pages
    assert "prefers-color-scheme: dark" in api.http.get("/style.css").text
    calls = {
        f"{method.upper()} {path}" for path, some in document["paths"].items() for method in some
    }
    assert set(page.texts("summary .code")) == calls
    (reveal,) = [one for one in page.all("details") if "/reveal_submission" in one.text()]
    names = {name.text() for name in reveal.css("dt")}
    assert set(document["components"]["schemas"]["RevealRequest"]["properties"]) <= names
    limits = "number, required, more than 0, at most 10,000,000,000"
    assert limits in [text.text() for text in reveal.css("dd")]
    (weights,) = [one for one in page.all("details") if "/get_weights" in one.text()]
    assert "weights[].hotkey" in [name.text() for name in weights.css("dt")]
    assert page.all("script") == []


def test_a_page_reads_no_more_rows_than_it_shows(api, monkeypatch):
    for name, most in (("PLACES", 3), ("VERDICTS", 2), ("ROUNDS", 2)):
        monkeypatch.setattr(leaderboard, name, most)
    for _ in range(5):
        api.judge("/create_round", {})
    for speed in range(9):
        api.judged(ALICE, 1000.0 + speed)
    loaded: list[object] = []
    event.listen(Submission, "load", lambda row, _: loaded.append(row))
    page = Page(api, "/")
    assert (len(page.rows()), len(page.rows(2))) == (3, 2)
    assert "Only the first 3 are shown" in page.text
    assert len(loaded) <= 3 + 1 + 2
    path, numbers = "/rounds", []
    while path:
        shown = Page(api, path)
        numbers.append([row[0] for row in shown.rows()])
        path = next((link.attributes["href"] or "" for link in shown.all("main p a")), "")
    assert numbers == [["Round 5", "Round 4"], ["Round 3", "Round 2"], ["Round 1"]]
