"""Charts are checked by reading the drawing back: where do bars and points lie, and what do labels say?"""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from cdc_plugin.report.charts import (
    Frame,
    caution_chart,
    cluster_chart,
    reliability_diagram,
    right_wrong_histogram,
    round_ticks,
    tag,
    training_charts,
)
from cdc_plugin.report.page_data import ClusterFigures


def elements(drawing: str, name: str, class_: str | None = None) -> list[ElementTree.Element]:
    """The elements of a drawing, which must be well-formed XML, by name and one of their classes."""
    found = ElementTree.fromstring(drawing).iter(name)
    return [each for each in found if class_ is None or class_ in each.get("class", "").split()]


def place(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "").removesuffix("%"))


def points(drawing: str, class_: str) -> list[list[float]]:
    [curve] = elements(drawing, "polyline", class_)
    return [[float(value) for value in pair.split(",")] for pair in curve.get("points", "").split()]


def figures(accuracy: list[float | None], confidence: list[float | None], count: list[int], **more) -> dict:
    bins = {"accuracy": accuracy, "confidence": confidence, "count": count}
    return {"bins": bins, "ACC": 0.5, "CONF": 0.9, "ECE": 0.4, **more}


@pytest.mark.parametrize(
    ("right", "stated", "kind", "other"), [(0.5, 0.9, "over", "under"), (0.9, 0.6, "under", "over")]
)
def test_between_accuracy_and_stated_confidence_a_bin_is_hatched(right, stated, kind, other):
    drawing = reliability_diagram("head", figures([None, right], [None, stated], [0, 4]))
    [bar], [gap], [end] = (elements(drawing, "rect", name) for name in ("bar", kind, "end"))
    assert place(bar, "height") == pytest.approx(min(right, stated) * 262)
    assert place(gap, "height") == pytest.approx(abs(right - stated) * 262)
    assert place(gap, "y") + place(gap, "height") == pytest.approx(place(bar, "y"))
    assert place(end, "y") + 1 == pytest.approx(place(bar if kind == "over" else gap, "y"))
    assert not elements(drawing, "rect", other)


def test_the_mean_lines_lie_where_accuracy_and_confidence_are_and_bars_are_shares_of_the_images():
    drawing = reliability_diagram("head", figures([0.5, 0.5], [0.4, 0.9], [1, 3]))
    above, across = elements(drawing, "line", "mean-accuracy")
    assert place(above, "x1") == place(above, "x2") == pytest.approx(44 + 0.5 * 262)
    assert place(across, "y1") == place(across, "y2") == pytest.approx(86 + 0.5 * 262)
    stated = [place(each, "x1") for each in elements(drawing, "line", "mean-confidence")]
    assert stated == pytest.approx([44 + 0.9 * 262] * 2)
    assert "ECE 40.0\u00a0%" in drawing
    heights = [place(bar, "height") for bar in elements(drawing, "rect", "density")]
    assert heights[1] == pytest.approx(3 * heights[0])


def test_without_labels_there_are_no_bars_of_accuracy_and_the_drawing_says_why():
    unlabelled = {"bins": {"accuracy": [None] * 2, "confidence": [None, 0.8], "count": [0, 4]}, "CONF": 0.8}
    drawing = reliability_diagram("head", unlabelled)
    assert not elements(drawing, "rect", "bar")
    assert len(elements(drawing, "rect", "density")) == 1
    [description] = [each.text for each in elements(drawing, "desc")]
    assert "there are no labels" in description


def test_right_and_wrong_are_each_a_share_of_their_own_group():
    drawing = right_wrong_histogram("head", {"histogram": {"right": [0, 10, 30], "wrong": [1, 1, 0]}})
    right = [place(bar, "height") for bar in elements(drawing, "rect", "right")]
    wrong = [place(bar, "height") for bar in elements(drawing, "rect", "wrong")]
    assert right[1] == pytest.approx(3 * right[0])
    assert sum(right) == pytest.approx(sum(wrong))
    middle = place(elements(drawing, "rect", "right")[0], "y") + right[0]
    assert all(place(bar, "y") == pytest.approx(middle) for bar in elements(drawing, "rect", "wrong"))
    assert "wrong: 0" in right_wrong_histogram("head", {"histogram": {"right": [0, 3], "wrong": [0, 0]}})


def test_caution_shows_the_running_mean_of_confidence_and_the_measured_accuracy():
    drawing = caution_chart(np.array([0.8, 1.0]), [(0.5, 1.0), (1.0, 0.5)])
    expected, measured = points(drawing, "expected"), points(drawing, "measured")
    frame = Frame(44, 12, 262, 170, y_low=0.5, y_high=1.0)  # half of the images is right in the end
    assert expected == [
        pytest.approx([frame.x(0.5), frame.y(1.0)], abs=0.01),
        pytest.approx([306, frame.y(0.9)], abs=0.01),
    ]
    assert measured[-1] == pytest.approx([306, frame.y(0.5)], abs=0.01)
    # Without labels there is no measured line, and many images stay small.
    drawing = caution_chart(np.random.default_rng(0).random(100_000), None)
    assert not elements(drawing, "polyline", "measured")
    assert len(points(drawing, "expected")) <= 100


def test_text_of_a_drawing_is_escaped():
    drawing = reliability_diagram('<script>"&', figures([0.5], [0.9], [4]))
    assert "<script>" not in drawing
    assert elements(drawing, "title")[0].text == 'Reliability diagram: <script>"&'
    assert tag("text", "a<b", class_='"') == '<text class="&#34;">a&lt;b</text>'


@pytest.mark.parametrize("seed", range(20))
def test_ticks_are_few_round_and_cover_the_range(seed):
    random = np.random.default_rng(seed)
    low = random.normal() * 10.0 ** random.integers(-3, 4)
    high = low + random.random() * 10.0 ** random.integers(-3, 4) + 1e-9
    ticks = round_ticks(low, high)
    slack = 1e-6 * (high - low)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 6
    mantissa = (ticks[1] - ticks[0]) / 10 ** np.floor(np.log10((ticks[1] - ticks[0]) * (1 + 1e-9)))
    assert round(mantissa, 6) in (1, 2, 5)


def test_ticks_of_a_constant_surround_it():
    ticks = round_ticks(3.0, 3.0)
    assert ticks[0] < 3 < ticks[-1]


def test_one_epoch_is_a_dot_and_several_are_a_line():
    assert training_charts([]) == []
    [(_, one)] = training_charts([{"epoch": 1, "confidence": 0.5}])
    assert len(elements(one, "circle", "dot")) == 1
    [(title, three)] = training_charts([{"epoch": number, "confidence": number / 4} for number in (1, 2, 3)])
    assert title == "Mean confidence, in\u00a0%"
    assert len(points(three, "measured")) == 3
    assert points(three, "measured")[1][0] == pytest.approx(48 + 258 / 2)


def test_numbers_that_an_epoch_lacks_or_that_are_not_finite_are_left_out():
    history = [{"selected": None}, {"selected": float("nan")}, {"selected": 0.25, "seconds": 3}]
    assert ["From 25 in epoch 3" in drawing for _, drawing in training_charts(history)] == [True]


@pytest.mark.parametrize("clusters", [1, 2, 37, 200, 1000])
def test_every_cluster_has_its_two_bars_within_the_width_and_labels_have_room(clusters):
    drawing = cluster_chart([ClusterFigures(5, 0.5)] * clusters)
    bars = elements(drawing, "rect")
    assert len(bars) == 2 * clusters
    assert all(place(bar, "x") >= 0 and place(bar, "x") + place(bar, "width") <= 100.001 for bar in bars)
    numbers = [each for each in elements(drawing, "text") if (each.text or "").isdigit() and place(each, "y") > 300]
    assert 1 <= len(numbers) <= 21
    assert sum(each.get("class") != "minor" for each in numbers) <= 11
    more = cluster_chart([ClusterFigures(5, 0.5)] * clusters + [ClusterFigures(0)])  # of no confidence, so without bar
    assert len(elements(more, "rect", "density")) == clusters
