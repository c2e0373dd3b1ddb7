"""Charts as SVG: positions of points, ticks and labels, and clipping."""

import random
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from quasar_kernels.line_plot import FROM_ZERO, Line, Scale, line_plot, spread

SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg):
    return ElementTree.fromstring(svg)  # noqa: S314 made by the test


def test_decades_of_a_logarithmic_axis_are_equally_long():
    svg = line_plot("t", "x", "y", [Line("a", "red", [(1, 1), (10, 10), (100, 100)])])
    places = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x2 - x1 == pytest.approx(x1 - x0, abs=0.2)
    assert x1 > x0
    assert y1 - y2 == pytest.approx(y0 - y1, abs=0.2)
    assert y1 < y0


def test_a_linear_axis_begins_at_zero_and_the_data_fill_the_axes():
    line = Line("a", "red", [(100, 0.3), (200, 1.0), (400, 0.5)])
    svg = line_plot("t", "x", "y", [line], x=FROM_ZERO)
    xs = [float(x) for x in re.findall(r'cx="([\d.]+)"', svg)]
    ys = [float(y) for y in re.findall(r'cy="([\d.]+)"', svg)]
    assert xs[2] - xs[1] == pytest.approx(2 * (xs[1] - xs[0]), abs=0.2)
    across = [float(x) for x in re.findall(r'class="grid" d="M([\d.]+) [\d.]+V', svg)]
    assert min(across) == pytest.approx(xs[0] - (xs[1] - xs[0]), abs=0.3)  # the grid line at zero
    vertical = re.search(r'class="grid" d="M[\d.]+ ([\d.]+)V([\d.]+)"', svg)
    assert vertical is not None
    assert [min(ys), max(ys)] == [float(vertical[1]), float(vertical[2])]


@pytest.mark.parametrize(
    ("low", "high"), [(512, 1e6), (0.3, 1.5), (2.6, 38), (0.9, 1.1), (0.013, 5.9), (5, 5)]
)
def test_an_axis_has_at_least_three_round_ticks_within_the_data(low, high):
    root = drawn(line_plot("t", "x", "y", [Line("a", "red", [(1, low), (2, high)])]))
    ticks = [
        float(element.text.replace(",", ""))
        for element in root.iter(f"{SVG}text")
        if element.get("text-anchor") == "end"
    ]
    assert len(ticks) >= 3
    if low < high:
        assert low <= min(ticks) <= max(ticks) <= high
    digits = [f"{tick:.10e}".split("e")[0].replace(".", "").rstrip("0") for tick in ticks]
    assert all(len(each) <= 3 for each in digits), ticks


def test_labels_keep_their_distance_and_order():
    draw = random.Random(1)
    for _ in range(200):
        wanted = [draw.uniform(0, 300) for _ in range(draw.randint(1, 8))]
        found = spread(wanted, 17, 300)
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        assert all(found[b] - found[a] >= 17 - 1e-9 for a, b in pairwise(order)), (wanted, found)
        assert max(found) <= 300
    assert spread([10, 100], 17, 300) == [10, 100]
    assert spread([100, 90, 100], 17, 300) == [107, 90, 124]
    assert spread([290, 299], 17, 300) == [283, 300]


def test_a_line_is_clipped_at_the_end_of_an_axis():
    line = Line("a", "red", [(1, 9), (2, 1), (3, 0.5)])
    root = drawn(line_plot("t", "x", "y", [line], y=Scale(high=2)))
    (area,) = (group for group in root.iter(f"{SVG}g") if group.get("clip-path") == "url(#area)")
    (cut,) = root.iter(f"{SVG}rect")
    top, left = float(cut.get("y", "")), float(cut.get("x", ""))
    first, *shown = area.iter(f"{SVG}circle")
    assert float(first.get("cy", "")) < top
    for dot in shown:
        assert top <= float(dot.get("cy", "")) <= top + float(cut.get("height", ""))
        assert left <= float(dot.get("cx", "")) <= left + float(cut.get("width", ""))
