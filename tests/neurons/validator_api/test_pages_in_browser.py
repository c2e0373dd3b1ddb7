"""The pages in headless Chromium: accessibility, colour schemes, and widths of screens."""

import os
import shutil
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from tests.neurons.live_api import ALICE, BOB, LiveApi, serve
from tests.processes import HANG

TELEPHONE: ViewportSize = {"width": 360, "height": 740}
DESK: ViewportSize = {"width": 1280, "height": 800}
OPEN = "document.querySelectorAll('details').forEach(one => one.open = true)"
"""Opens all folded parts of a page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("NOT TESTED IN A BROWSER: no chromium (Debian: apt install chromium)")
    # Chromium's sandbox does not work for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    """A round with a confirmed, a rejected, a queued and an unrevealed submission: ids 1 to 4."""
    with serve(tmp_path_factory.mktemp("pages")) as live:
        for key in (ALICE, BOB):
            live.register(key, model="M" * 120)
        lengths = (128, 256, 512, 200_000)
        figures = {str(length): {"tokens_per_sec": 1e3 * length} for length in lengths}
        first = live.submit(ALICE, 2e8, target=1_000_000, benchmarks=figures)
        second = live.submit(BOB, 5.0, fork="https://x.example/" + "long" * 100)
        measured = {"1000000": {"tokens_per_sec": 2.1e8}}
        live.judge("/mark_validated", {"submission_id": first, "score": 1, "measured": measured})
        reason = "wrong" * 100
        live.judge("/mark_validated", {"submission_id": second, "score": 0, "reason": reason})
        live.submit(BOB, 6.0)
        live.commit(BOB)
        yield live


def opened(browser: Browser, scheme: Literal["light", "dark"], **options: Any) -> Page:
    page = browser.new_context(color_scheme=scheme, **options).new_page()
    page.set_default_timeout(1000 * HANG)  # milliseconds
    return page


def test_the_pages_are_accessible(browser: Browser, api: LiveApi) -> None:
    # axe injects a script, which the pages' Content-Security-Policy forbids
    light = opened(browser, "light", viewport=DESK, bypass_csp=True)
    dark = opened(browser, "dark", viewport=TELEPHONE, bypass_csp=True)
    for page, paths in (
        (light, ("/", "/rounds", "/submissions/2", "/submissions/4", "/docs", "/nothing")),
        (dark, ("/", "/submissions/1", "/docs")),
    ):
        for path in paths:
            page.goto(api.url + path)
            page.evaluate(OPEN)
            results = Axe().run(page)
            assert results.violations_count == 0, results.generate_report()
            assert len(results.response["passes"]) > 10
        page.context.close()


def test_a_telephone_needs_no_sideways_scrolling_and_the_dark_scheme_is_dark(browser, api):
    messages: list[str] = []
    brightness = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
    light = opened(browser, "light", viewport=TELEPHONE)
    dark = opened(browser, "dark", viewport=TELEPHONE)
    for page, path in (
        (light, "/"),
        (dark, "/"),
        (dark, "/submissions/1"),
        (dark, "/submissions/2"),
        (light, "/rounds"),
        (light, "/docs"),
    ):
        page.on("console", lambda message: messages.append(message.text))
        page.goto(api.url + path)
        page.evaluate(OPEN)
        assert page.evaluate("document.documentElement.scrollWidth") == TELEPHONE["width"]
        for table in page.query_selector_all(".wide"):  # these could scroll separately
            assert page.evaluate("one => one.scrollWidth <= one.clientWidth", table)
        assert all((part > 127) == (page is light) for part in page.evaluate(brightness))
    assert messages == []  # the policy blocked nothing
