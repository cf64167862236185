import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.report import svg

finite = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False)


def picture(figure: str) -> ET.Element:
    return ET.fromstring(figure)


@given(finite, finite)
def test_ticks_cover_what_they_measure(first, second):
    low, high = sorted((first, second))
    ticks = svg.nice_ticks(low, high)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 12
    assert list(ticks) == sorted(set(ticks))


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=200))
def test_a_histogram_loses_no_value(values):
    text = svg.histogram("h", values, x_label="x")
    assert sum(int(count) for count in re.findall(r": (\d+)</title>", text)) == len(values)


@given(st.lists(finite, min_size=1, max_size=30))
def test_lines_stay_inside_the_picture(values):
    points = [(float(index), value) for index, value in enumerate(values)]
    figure = picture(svg.line_chart("t", [svg.Series(name="s", points=points)], x_label="x", y_label="y"))
    for dot in figure.iter("circle"):
        assert svg.LEFT - 0.2 <= float(dot.attrib["cx"]) <= svg.WIDTH - svg.RIGHT + 0.2
        assert svg.TOP - 0.2 <= float(dot.attrib["cy"]) <= svg.HEIGHT - svg.BOTTOM + 0.2


def test_areas_stand_on_one_another():
    series = [svg.Series(name="a", points=[(0, 1), (1, 2)]), svg.Series(name="b", points=[(0, 1), (1, 2)])]
    figure = picture(svg.area_chart("t", series, x_label="x", y_label="y"))
    lower, upper = (
        [float(pair.split(",")[1]) for pair in line.attrib["points"].split()] for line in figure.iter("polyline")
    )
    bottom = svg.HEIGHT - svg.BOTTOM
    assert [bottom - y for y in upper] == pytest.approx([2 * (bottom - y) for y in lower], abs=0.2)


def test_shares_of_a_row_fill_it():
    figure = picture(svg.share_bars("t", {"samples": {"a": 3, "b": 1}, "dollars": {"b": 2}}))
    widths = [float(bar.attrib["width"]) + 2 for bar in figure.iter("rect")]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.5)
    assert widths[0] + widths[1] == pytest.approx(widths[2], abs=0.5)


def test_many_parts_share_the_last_colour_and_none_is_lost():
    text = svg.share_bars("t", {"row": {f"p{index:02d}": 20 - index for index in range(12)}})
    shares = [float(share) for share in re.findall(r"\((\d+\.\d)%\)", text)]
    assert len(shares) == svg.MAX_SERIES
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert ">other<" in text


def test_long_lines_are_thinned_and_keep_their_ends():
    points = [(float(index), float(index)) for index in range(5000)]
    kept = svg.thinned(points)
    assert len(kept) == svg.MAX_POINTS
    assert (kept[0], kept[-1]) == (points[0], points[-1])


@pytest.mark.parametrize(
    "figure",
    [
        svg.line_chart("t", [], x_label="x", y_label="y"),
        svg.area_chart("t", [svg.Series(name="s", points=[])], x_label="x", y_label="y"),
        svg.bar_chart("t", [], {}, x_label="x", y_label="y"),
        svg.histogram("t", [], x_label="x"),
        svg.share_bars("t", {"row": {"a": 0.0}}),
    ],
)
def test_nothing_to_plot_is_said(figure):
    assert "nothing to plot" in figure
    assert "<svg" not in figure


def test_names_are_escaped_everywhere():
    evil = "<b>&\"'"
    figures = [
        svg.line_chart(evil, [svg.Series(name=evil, points=[(0, 0), (1, 1)])] * 2, x_label=evil, y_label=evil),
        svg.bar_chart(evil, [evil], {evil: [1.0], "other": [2.0]}, x_label=evil, y_label=evil),
        svg.share_bars(evil, {evil: {evil: 1.0}}),
    ]
    for figure in figures:
        assert "<b>" not in figure
        picture(figure)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1_500_000, "1.5M"), (12_000, "12k"), (0.25, "0.25"), (0.00025, "2.5e-04"), (2e9, "2G"), (-50, "-50")],
)
def test_short_numbers(value, text):
    assert svg.short_number(value) == text
