"""Renders the pages from their templates, with their headers, and serves the style sheet."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, Response

from harness.terminal import span
from neurons.validator_api.competition.ranking import is_confirmed
from neurons.wire.rules import LEAGUES, league_of
from quasar_kernels.line_plot import BLUE, PURPLE, YELLOW, Line, line_plot

TEMPLATES = Path(__file__).with_name("templates")
HEADERS = {
    # In addition to escaping: browsers run no scripts, and load only the style sheet and images
    # that a page contains.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "public, max-age=5",
}
NOT_REFRESHED = "off"
"""The value of a page's query parameter `refresh` that pauses reloading."""
UNITS = ((1e6, "M "), (1e3, "k "))
SLOWEST = 1e-9
"""Lowest speed that is drawn; lower claims round to 0, which a logarithmic axis does not have."""
COLOURS = (BLUE, PURPLE, YELLOW)

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
    """Render the template `name` with `values`, which were read at `now` (naive UTC).

    A browser reloads the page after `refresh` seconds unless the reader has paused it.
    """
    values |= {"now": now, "refresh": refresh, "paused": paused}
    html = _environment.get_template(name).render(**values)
    shown = HTMLResponse(html, status, headers=HEADERS)
    if refresh and not paused:
        shown.headers["Refresh"] = f"{refresh:g}"
    return shown


def style_sheet() -> Response:
    """Return the style sheet, which browsers may cache for an hour."""
    text = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    headers = {**HEADERS, "Cache-Control": "public, max-age=3600"}
    return Response(text, media_type="text/css", headers=headers)


def _plot(**series: Sequence[tuple[int, float]]) -> str:
    """Return a plot of labelled series of (length, tokens/s) as a data URL."""
    most = max(speed for points in series.values() for _, speed in points)
    size, unit = next((one for one in UNITS if most >= one[0]), (1.0, ""))
    lines = [
        Line(label, colour, [(length, max(speed, SLOWEST) / size) for length, speed in points])
        for (label, points), colour in zip(series.items(), COLOURS, strict=True)
        if points
    ]
    svg = line_plot("Speeds", "tokens", f"{unit}tokens/s", lines)
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def _time(value: datetime) -> str:
    return f"{value:%Y-%m-%d %H:%M} UTC"


def _hotkey(value: str) -> str:
    """Return enough of a hotkey to distinguish it from others by eye."""
    return value if len(value) <= 16 else f"{value[:6]}…{value[-6:]}"


def _figure(value: float) -> str:
    """Return a speed or a score: an integer from 1,000, below that with one decimal."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _breakable(name: str) -> Markup:
    """Return a field's name that browsers may break between its words."""
    return Markup(re.sub(r"([_.])", r"\1<wbr>", str(escape(name))))  # noqa: S704 — escaped


def _above(value: float) -> str:
    """Return the smallest number above `value` that `_figure` can write."""
    return _figure(math.floor(value) + 1 if value >= 1000 else (math.floor(10 * value) + 1) / 10)


_environment.globals |= {
    "plot": _plot,
    "LEAGUES": LEAGUES,
    "league_of": league_of,
    "is_confirmed": is_confirmed,
    "NOT_REFRESHED": NOT_REFRESHED,
}
_environment.filters |= {
    "time": _time,
    "figure": _figure,
    "above": _above,
    "hotkey": _hotkey,
    "span": span,
    "breakable": _breakable,
}
