"""The page of a comparison as text: its parts, its marks, seeds in one diagram, and names that can do no harm."""

import re
from dataclasses import replace

import numpy as np
import pytest

from cdc_plugin.evaluation.records import measure_head
from cdc_plugin.metrics.over_seeds import Row, Value
from cdc_plugin.report.grid_page import pool, render_grid
from tests.helpers.html_page import Page

HOSTILE = "<script>alert('x')</script>\" onload=\"x()" + "W" * 300


def predictions(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, 60)
    logits = random.normal(size=(60, 3)) + 2 * np.eye(3)[labels]
    return (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(np.float32), labels


def row(label: str, accuracy: float, seeds: int = 2, **more: object) -> Row:
    deviation = 0.01 if seeds > 1 else None
    values = {key: Value(number, deviation, seeds) for key, number in (("ACC", accuracy), ("ECE", 0.1), ("CONF", 0.9))}
    values["seconds"] = Value(41.0, deviation, seeds)
    given = {"set": "digits", "group": "opponents", "method": label, "uses_labels": False, **more}
    figures = [measure_head(*predictions(seed)) for seed in range(seeds)]
    return Row(label=label, seeds=seeds, values=values, figures=figures, **given)  # type: ignore[arg-type]


def page_of(rows: list[Row], verdicts: dict[str, list[str]] | None = None, settings: str | None = None) -> Page:
    return Page(render_grid("methods", [("backbone", "b.pt")], rows, verdicts or {}, settings, "cdc-compare --seeds 2"))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    silent = row("k-means", 0.85)
    silent = replace(silent, values={**silent.values, "ECE": None, "CONF": None}, figures=[{}, {}])
    ours, reference = row("CDC-Cal", 0.95, group="CDC"), row("linear", 0.99, group="reference", uses_labels=True)
    return [silent, row("SCAN", 0.9), ours, reference]


def test_the_page_has_all_parts_marks_of_the_best_and_diagrams(rows):
    page = page_of(rows, {"digits": ["CDC wins."]}, "epochs: 3")
    assert {"summary", "figures", "charts", "reliability", "settings"} <= set(page.ids)
    for words in ("4 methods on 1 set of images, 2 seeds each.", "CDC wins.", "epochs: 3", "cdc-compare --seeds 2"):
        assert words in page.text
    assert "images of yours" not in page.text
    table = page.html.split("<table")[1].split("</table>")[0]
    assert '<span class="better">95.0<span class="skip"> best</span></span> <small>± 1.0</small>' in table
    assert '<span class="second">90.0<span class="skip"> second best</span></span>' in table
    assert "linear</bdi>*" in table
    assert table.count('class="better"') == 1  # the ECE of all rows reads the same
    assert table.count('class="ours"') == 1
    # Rows with confidence have a diagram and a histogram.
    found = re.findall(r"Reliability diagram: ([^<]+)<", page.html)
    assert found == ["SCAN", "CDC-Cal", "linear"]
    assert page.html.count("Confidence of right and wrong images") == 3
    assert page.tags.count("figure") == 3 + 3  # accuracy, ECE and time come first


def test_seeds_are_pooled_by_count_in_a_hand_worked_case():
    first = {"count": [2, 0], "confidence": [0.4, None], "accuracy": [0.5, None]}
    second = {"count": [6, 4], "confidence": [0.2, 0.9], "accuracy": [0.0, 0.75]}
    histograms = [{"right": [1, 0], "wrong": [1, 0], "all": [2, 0]}, {"right": [0, 3], "wrong": [6, 1], "all": [6, 4]}]
    found = pool([{"bins": first, "histogram": histograms[0]}, {"bins": second, "histogram": histograms[1]}])
    assert found["bins"]["count"] == [8, 4]
    assert found["bins"]["confidence"] == pytest.approx([(2 * 0.4 + 6 * 0.2) / 8, 0.9])
    assert found["bins"]["accuracy"] == pytest.approx([1 / 8, 0.75])
    assert found["histogram"] == {"right": [1, 3], "wrong": [7, 1]}
    assert pool([]) == pool([{"cluster_sizes": [1]}]) == {}


def test_pooling_seeds_equals_measuring_all_images_at_once():
    probs, labels = predictions(0)
    whole = measure_head(probs, labels)
    found = pool([measure_head(probs[part], labels[part]) for part in (slice(0, 20), slice(20, 60))])
    assert found["bins"]["count"] == whole["bins"]["count"]
    for name in ("confidence", "accuracy"):
        for pooled, direct in zip(found["bins"][name], whole["bins"][name], strict=True):
            assert (pooled is None) == (direct is None)
            assert pooled is None or pooled == pytest.approx(direct)


def test_without_labels_the_page_shows_confidence_and_sizes_and_claims_no_accuracy():
    values = {"CONF": Value(0.8, None, 1), "largest_cluster": Value(0.4, None, 1), "seconds": Value(3.0, None, 1)}
    bare = Row("photos", "CDC", "cdc", "CDC-Cal", False, 1, values, [measure_head(predictions(0)[0], None)])
    page = page_of([bare])
    assert "Without labels there is no accuracy" in page.text
    assert "Reliability diagram" not in page.html
    for title in ("Mean confidence", "Largest cluster", "Time of a run"):
        assert f"<h3>{title}</h3>" in page.html


def test_verdicts_stand_below_the_name_of_their_set(rows):
    other = replace(rows[1], set="animals")
    verdicts = {"digits": ["A wins.", "By 3.0 ± 0.1 %."], "animals": ["B wins."]}
    page = page_of([*rows, other], verdicts)
    summary = page.html.split('id="summary"')[1].split("</section>")[0]
    assert summary.count("<h3>") == 2
    assert "<li>A wins.</li>" in summary
    assert "3.0\u00a0±\u00a00.1\u00a0%" in summary
    assert page.tags.count("details") == 2  # diagrams of each set


def test_hostile_names_are_shown_and_not_obeyed():
    bad = row(HOSTILE, 0.9, set=HOSTILE, group=HOSTILE, method=HOSTILE)
    page = page_of([bad, row("b", 0.8)], {HOSTILE: [HOSTILE], "digits": []}, HOSTILE)
    assert "<script" not in page.html
    assert "alert('x')" in page.text


def test_a_single_row_an_empty_table_and_rows_with_fewer_seeds_are_pages_too():
    page = page_of([row("CDC-Cal", 0.9, 1)])
    assert "1 method on 1 set of images, 1 seed each." in page.text
    assert "±" not in page.text
    assert "No run is finished yet." in page_of([]).text
    page = page_of([row("a", 0.9, 2), row("b", 0.8, 1)])
    assert re.search(r"b\s*1 seed", page.text)
    assert "1 to 2 seeds each" in page.text
