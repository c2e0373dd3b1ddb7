"""Makes HTML of the views: the templates, the headers of every page, and the style sheet."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from neurons.validator_api.pages.plot import legend, plot
from neurons.wire.rules import LEAGUES

TEMPLATES = Path(__file__).with_name("templates")
HEADERS = {
    # What others write on a page is escaped; were it not, no browser would run or load it.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "public, max-age=5",
}
NOT_REFRESHED = "off"
"""The value of a page's parameter `refresh` for readers who want it to stand still."""

ERRORS = {
    404: (
        "Not found",
        "There is nothing at this address. The round or submission may have another number.",
    ),
    405: ("Not a page", "This address is for programs: a browser cannot open it."),
    500: ("Server error", "The server made a mistake and has logged it. Try again in a moment."),
    503: (
        "Back soon",
        "The competition's database cannot be used now. Nothing that was accepted is lost. "
        "This page tries again by itself.",
    ),
}
"""The title and text that a person reads instead of an error's `detail`."""

_environment = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(
    name: str,
    status: int = 200,
    *,
    now: datetime | None = None,
    refresh: float | None = None,
    paused: bool = False,
    **values: object,
) -> Response:
    """Return the page made of the template `name` with these values.

    Args:
        now: when the values were read; shown at the foot of the page.
        refresh: seconds until a browser loads the page again; None for a page that stays as it is.
        paused: the reader wants a page that would refresh itself to stand still.
    """
    values |= {"now": now, "refresh": refresh, "paused": paused}
    html = _environment.get_template(name).render(**values)
    shown = HTMLResponse(html, status, headers=HEADERS)
    if refresh and not paused:
        shown.headers["Refresh"] = f"{refresh:g}"
    return shown


def error(
    request: Request, status: int, detail: Any, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error: a page for a client that accepts HTML, `{"detail": ...}` for others."""
    if _wants_html(request):
        try_again = float((headers or {}).get("Retry-After", 0)) or None
        title, text = ERRORS.get(status) or (HTTPStatus(status).phrase, _text(detail))
        shown = page("error.html", status, refresh=try_again, title=title, text=text)
    else:
        shown = JSONResponse({"detail": detail}, status)
    shown.headers.update({**(headers or {}), "Cache-Control": "no-store", "Vary": "Accept"})
    return shown


def style_sheet() -> Response:
    """Return the style sheet, which a browser may keep for an hour."""
    text = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    headers = {**HEADERS, "Cache-Control": "public, max-age=3600"}
    return Response(text, media_type="text/css", headers=headers)


def _wants_html(request: Request) -> bool:
    accepted = request.headers.get("Accept", "").lower()
    return "text/html" in accepted and "application/json" not in accepted


def _text(detail: Any) -> str:
    """Return an error's detail as text: FastAPI gives a list of problems for bad parameters."""
    if not isinstance(detail, list):
        return str(detail)
    return "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in detail)


def _time(value: datetime) -> str:
    return f"{value:%Y-%m-%d %H:%M} UTC"


def _hotkey(value: str) -> str:
    """Return enough of a hotkey to tell it from others by eye."""
    return value if len(value) <= 16 else f"{value[:6]}…{value[-6:]}"


def _figure(value: float) -> str:
    """Return a speed or a score as far as its digits mean something."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _breakable(name: str) -> Markup:
    """Return a field's name that a narrow column may break between its words."""
    return Markup(re.sub(r"([_.])", r"\1<wbr>", str(escape(name))))  # noqa: S704 — escaped


def _above(value: float) -> str:
    """Return the smallest figure, in the digits that are shown, that is above a value."""
    return _figure(math.floor(value) + 1 if value >= 1000 else (math.floor(10 * value) + 1) / 10)


_environment.globals |= {
    "plot": plot,
    "legend": legend,
    "LEAGUES": LEAGUES,
    "NOT_REFRESHED": NOT_REFRESHED,
}
_environment.filters |= {
    "time": _time,
    "figure": _figure,
    "above": _above,
    "hotkey": _hotkey,
    "breakable": _breakable,
}
