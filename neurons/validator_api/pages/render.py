"""Makes HTML of the views: the templates, the headers of every page, and the style sheet."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from neurons.validator_api.pages.plot import plot

TEMPLATES = Path(__file__).with_name("templates")
HEADERS = {
    # What others write on a page is escaped; were it not, no browser would run or load it.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "public, max-age=5",
}

_environment = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(name: str, status: int = 200, **values: object) -> Response:
    """Return the page made of the template `name` with these values."""
    html = _environment.get_template(name).render(**values)
    return HTMLResponse(html, status, headers=HEADERS)


def style_sheet() -> Response:
    """Return the style sheet, which a browser may keep for an hour."""
    text = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    headers = {**HEADERS, "Cache-Control": "public, max-age=3600"}
    return Response(text, media_type="text/css", headers=headers)


def _time(value: datetime) -> str:
    return f"{value:%Y-%m-%d %H:%M} UTC"


def _hotkey(value: str) -> str:
    """Return enough of a hotkey to tell it from others by eye."""
    return value if len(value) <= 16 else f"{value[:6]}…{value[-6:]}"


def _figure(value: float) -> str:
    """Return a speed or a score as far as its digits mean something."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


_environment.globals["plot"] = plot
_environment.filters |= {"time": _time, "figure": _figure, "hotkey": _hotkey}
