"""The pages for people, over real HTTP and through a browser's parser."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from selectolax.lexbor import LexborHTMLParser, LexborNode
from sqlalchemy import event, insert

from neurons.validator_api.competition.rounds import ACTIVE
from neurons.validator_api.config import utc
from neurons.validator_api.database.storage import Storage
from neurons.validator_api.database.tables import Miner, Round, Submission
from neurons.validator_api.pages.views import PLACES, ROUNDS, VERDICTS
from tests import postgresql
from tests.neurons.live_api import (
    ALICE,
    BLOCKS,
    BOB,
    Clock,
    Hotkey,
    LiveApi,
    commitment,
    revelation,
    serve,
)

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
    *("td", "figure", "figcaption", "svg", "text", "path", "circle", "rect"),
}
"""The elements that the pages are made of."""


class Page:
    """A page as a browser sees it."""

    def __init__(self, api: LiveApi, path: str, status: int = 200) -> None:
        self.reply = api.http.get(path)
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
        """Return the cells of a table's body."""
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


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """SQLite: on PostgreSQL one test runs every query of the pages."""
    return f"sqlite:///{tmp_path / 'api.db'}"


def judge(api: LiveApi, row: int, score: float, reason: str = "", **more: object) -> None:
    body = {"submission_id": row, "score": score, "reason": reason, **more}
    api.judge("/mark_validated", body)


def test_before_the_first_round_and_for_what_is_not_there(api: LiveApi) -> None:
    assert Page(api, "/").texts("h1") == ["Leaderboard"]
    assert "No round has begun" in Page(api, "/rounds").text
    for path in ("/rounds/1", "/submissions/1", f"/submissions/{10**9}", "/submissions/x%00"):
        assert Page(api, path, 404).texts("h1") == ["Not found"]
    for text in ("-1", "1e3", "٣", "9" * 30):
        assert Page(api, f"/rounds/{text}", 404)
        assert Page(api, f"/rounds?before={text}")


def test_the_pages_on_postgresql(server: postgresql.Server, tmp_path: Path) -> None:
    with serve(tmp_path, database_url=server.new_database()) as api:
        api.register(ALICE)
        check_leaderboard(api)
        for path in ("/rounds", "/rounds/1", "/submissions/1", "/submissions/3"):
            assert Page(api, path).text


def test_the_leaderboard_ranks_and_tells_the_time_left(api: LiveApi) -> None:
    check_leaderboard(api)


def check_leaderboard(api: LiveApi) -> None:
    api.register(BOB)
    slow = api.submit(ALICE, 4000.0, target=1_000_000)
    fast = api.submit(BOB, 15_000.0)
    wrong = api.submit(BOB, 9e9, target=200_000)
    api.submit(ALICE, 1.0, target=300_000)  # waits
    judge(api, slow, 1.0)
    judge(api, fast, 0.95)
    judge(api, wrong, 0.0, "The kernels fail the correctness gate.")
    api.clock.now += 3600 * 2.5
    page = Page(api, "/")
    assert page.texts("h1") == ["Round 1"]
    facts = [page.fact(name) for name in ("Time left", "Submissions", "In the queue")]
    assert facts == ["1 d 21 h", "4", "1"]
    assert [[row[0], row[2], row[3], row[4]] for row in page.rows()] == [
        ["1", "1M", "12,000", "60%"],
        ["2", "100k", "7,500", "25%"],
    ]
    # On a telephone the league stands below the miner, where there is no room for a column.
    shown = [row[1].split("#")[1] for row in page.rows()]
    assert shown == [f"{slow} 1M", f"{fast} 100k"]
    verdicts = {row[0]: row[3] for row in page.rows(1)}
    assert verdicts == {f"#{slow}": "confirmed", f"#{fast}": "confirmed", f"#{wrong}": "rejected"}


def test_a_submission_shows_its_figures_and_why_it_was_judged_so(api: LiveApi) -> None:
    claimed = {"512": {"tokens_per_sec": 300.0}, "2048": {"tokens_per_sec": 800.0}}
    row = api.submit(ALICE, 4000.0, benchmarks=claimed)
    assert Page(api, f"/submissions/{row}").fact("State") == "waiting for a validator"
    reason = "Measured 3000.0 of the claimed 4000.0 tokens/s: less than 90%."
    judge(api, row, 0.0, reason, measured={"100000": {"tokens_per_sec": 3000.0}})
    page = Page(api, f"/submissions/{row}")
    assert page.fact("State") == "rejected"
    assert page.texts(".reason") == [reason]
    assert page.rows() == [
        ["512", "300.0", "–"],
        ["2,048", "800.0", "–"],
        ["100,000", "4,000", "3,000"],
    ]
    dots = [node.attributes for node in page.all("svg circle.claimed")]
    points = [(float(dot["cx"] or 0), float(dot["cy"] or 0)) for dot in dots]
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))  # faster is higher
    (square,) = page.all("svg rect.measured")
    left = float(square.attributes["x"] or 0) + 5
    assert left == points[-1][0]  # at the same length
    assert float(square.attributes["y"] or 0) + 5 > points[-1][1]  # and slower
    spoken = page.all("svg")[0].attributes["aria-label"] or ""
    assert "4,000 tokens/s at 100,000 tokens; measured by a validator: 3,000 tokens/s" in spoken


def test_nothing_is_shown_before_its_reveal(api: LiveApi) -> None:
    body = commitment(ALICE, SALT, SECRET_FORK)
    row = int(api.ok("/commit_submission", body, ALICE)["submission_id"])
    pages = [Page(api, path) for path in ("/", "/rounds", "/rounds/1", f"/submissions/{row}")]
    hidden = (SALT, SECRET_FORK, "not-yet", body["commitment_hash"], "100,000", "100k", "127.0.0.1")
    for page in pages:
        assert [word for word in hidden if word in page.reply.text] == []
    assert pages[-1].fact("State") == "committed, hidden until its reveal"
    assert pages[-1].fact("Commitment") == f"{body['commitment_hash'][:16]}..."
    assert pages[-1].fact("Opens").endswith(f"in {BLOCKS} blocks")
    api.pass_blocks(BLOCKS)
    api.ok("/reveal_submission", revelation(ALICE, row, SALT, SECRET_FORK), ALICE)
    shown = Page(api, f"/submissions/{row}")
    assert shown.fact("Fork") == SECRET_FORK
    assert SALT not in shown.reply.text


def test_what_miners_send_is_text_and_nothing_else(api: LiveApi) -> None:
    for text in HOSTILE:
        check_escaped(api, Hotkey(f"//{text}"), text)


def check_escaped(api: LiveApi, key: Hotkey, text: str) -> None:
    api.register(key, model=text)
    row = api.submit(key, 5.0, fork=f"https://x.example/{text}")
    judge(api, row, 1.0, text)
    page = Page(api, f"/submissions/{row}")
    assert page.texts(".reason") == ["".join(filter(str.isprintable, text))]
    assert page.fact("Fork") == f"https://x.example/{text}"
    assert page.fact("Registered for") == text
    assert {node.tag or "" for node in page.all("*")} <= TAGS
    attributes = {name for node in page.all("*") for name in node.attributes}
    assert [name for name in attributes if name.startswith("on")] == []
    (title,) = page.all("title")
    assert title.text() == f"Submission {row} · QUASAR competition"


def test_only_a_web_address_is_a_link(api: LiveApi) -> None:
    safe = "https://github.com/alice/fork"
    for fork in (
        safe,
        "javascript:alert(1)",
        "data:text/html,<b>",
        "https://user:word@host/x",
        "//host/x",
        "https://[",
    ):
        page = Page(api, f"/submissions/{api.submit(ALICE, 5.0, fork=fork)}")
        links = [node.attributes["href"] for node in page.all("main dd.code a")]
        assert links == ([fork] if fork == safe else [])
        assert page.fact("Fork") == fork


def test_the_history_keeps_a_round_as_it_ended(api: LiveApi) -> None:
    row = api.submit(ALICE, 4000.0)
    judge(api, row, 1.0)
    api.judge("/finalize_round/1", {})
    api.get("/get_current_round")
    judge(api, row, 0.0, "refuted later")
    (now, ended) = Page(api, "/rounds").rows()
    assert (now[0], now[1], ended[0]) == ("Round 2", "–", "Round 1")
    assert ended[1].startswith(ALICE.hotkey[:6])
    page = Page(api, "/rounds/1")
    assert [(one[0], one[4]) for one in page.rows()] == [("1", "60%")]
    assert "Time left" not in page.text
    assert Page(api, "/rounds/2").fact("Time left") == "2 d"


def test_a_page_of_thousands_reads_what_it_shows(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'api.db'}"
    fill(url, submissions=3000, rounds=ROUNDS + 3)
    loaded: list[object] = []
    event.listen(Submission, "load", lambda row, _: loaded.append(row))
    with serve(tmp_path, database_url=url) as api:
        page = Page(api, "/")
        assert [row[0] for row in page.rows()] == [str(n) for n in range(1, PLACES + 1)]
        assert f"Only the first {PLACES} are shown" in page.text
        assert len(page.rows(1)) == VERDICTS
        assert len(loaded) <= PLACES + 1 + VERDICTS
        newest = Page(api, "/rounds")
        assert len(newest.rows()) == ROUNDS
        (earlier,) = newest.all("main p a")
        rest = Page(api, earlier.attributes["href"] or "")
        assert [row[0] for row in rest.rows()] == ["Round 3", "Round 2", "Round 1"]
        assert rest.all("main p a") == []


def fill(url: str, submissions: int, rounds: int) -> None:
    now = utc(Clock().now)
    with closing(Storage(url)) as storage:
        storage.write(
            lambda session: (
                session.execute(
                    insert(Miner),
                    [
                        {"hotkey": f"{n:048}", "uid": n, "registered_at": now}
                        for n in range(submissions)
                    ],
                ),
                session.execute(
                    insert(Round),
                    [
                        {
                            "id": n,
                            "round_number": n,
                            "start_time": now,
                            "end_time": now + timedelta(hours=48),
                            "status": ACTIVE if n == rounds else "completed",
                        }
                        for n in range(1, rounds + 1)
                    ],
                ),
                session.execute(
                    insert(Submission),
                    [
                        {
                            "miner_hotkey": f"{n:048}",
                            "round_id": rounds,
                            "target_sequence_length": 100_000 * (1 + n % 12),
                            "signature": "",
                            "created_at": now,
                            "is_revealed": True,
                            "tokens_per_sec": 1000.0 + n,
                            "validated_at": now,
                            "score": 1.0,
                        }
                        for n in range(submissions)
                    ],
                ),
            )
        )


def test_the_style_sheet_and_the_api_beside_it(api: LiveApi) -> None:
    reply = api.http.get("/style.css")
    assert reply.headers["content-type"].startswith("text/css")
    assert "prefers-color-scheme: dark" in reply.text
    paths = api.get("/openapi.json")["paths"]
    assert "/" not in paths  # pages are no part of the wire
    missing: httpx.Response = api.http.get("/nothing")
    assert missing.json() == {"detail": "Not Found"}
