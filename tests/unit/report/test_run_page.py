"""The pages as text: what they say, what they leave out, and that nothing in them can run or load anything."""

import re
from dataclasses import replace
from datetime import date
from importlib.resources import files

import numpy as np
import pytest

from cdc_plugin.data.images import ImageSet
from cdc_plugin.evaluation.records import build_prediction_table, measure_head, start_record
from cdc_plugin.report.models_page import render_comparison
from cdc_plugin.report.page_data import PageData
from cdc_plugin.report.run_page import collect_page, measure_clusters, render_page
from cdc_plugin.report.words import describe_outliers, percent
from tests.helpers.html_page import Page

SCORES = {"AUROC": 0.9, "FPR95": 0.2, "AUPR": 0.8}
HOSTILE = "<script>alert('x')</script>\" onload=\"x()"


@pytest.fixture
def data(digits) -> PageData:
    pixels, labels = digits
    random = np.random.default_rng(0)
    logits = random.normal(size=(200, 10)) + 4 * np.eye(10)[labels]
    probs = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(np.float32)
    names = [f"image {index}.png" for index in range(200)]
    figures = measure_head(probs, labels)
    return PageData(
        title="digits in 10 clusters",
        facts=[("images", "200")],
        rows=[("clustering head", {**figures, "ECE": 0.3}, figures)],
        diagrams=[("clustering head", figures)],
        label_free={"expected_accuracy": 0.9, "stability": None, "warnings": [{"kind": "x", "text": "Take care."}]},
        table=build_prediction_table(names, probs, probs),
        probs=probs,
        images=ImageSet(pixels, names, labels),
        history=[{"epoch": 1, "confidence": 0.5}],
        settings="clusters: 10",
        command="cdc-refine --clusters 10",
        outside=[{"data": "textures", "images": 600, "scores": {"distance": SCORES}}],
    )


def page_of(data: PageData) -> Page:
    return Page(render_page(data))


def record_of(name: str, figures: dict, **more: object) -> dict:
    """The report.json of an evaluated model."""
    data = {"data": "sets/digits", "images": 200, "classes": 10, "labels": True, "clusters": 10}
    model = {"name": name, "writer": "SCAN", "path": None}
    return {"model": model, "after": {"kmeans": {}, "model": figures}, "label_free": {}, "outside": [], **data, **more}


def test_a_page_has_all_parts_and_nothing_is_fetched_or_runs(data):
    page = page_of(data)
    wanted = {"summary", "quality", "figures", "reliability", "caution", "training", "clusters", "gallery", "outside"}
    assert wanted | {"settings"} <= set(page.ids)
    better = f"✓ {percent(data.rows[0][2]['ECE'])}".replace("\u00a0", " ")  # a mark that needs no colour
    words = ("Take care.", "cdc-refine --clusters 10", "textures", "can’t tell without labels", better)
    for said in (*words, date.today().isoformat()):
        assert said in page.text
    assert "not kept" not in page.text
    assert all(target.startswith("data:") for target in page.fetched)
    assert "default-src 'none'" in page.html
    assert not re.search(r"https?://|@import|url\((?!#)", page.html)


def test_an_empty_cluster_is_named_among_the_confused_but_not_linked(data):
    # Every image leans a little towards a cluster that none is in.
    probs = np.concatenate([0.8 * data.probs, np.full((200, 1), 0.2, dtype=np.float32)], axis=1)
    probs[probs.argmax(axis=1) == 10, 10] = 0.01
    probs /= probs.sum(axis=1, keepdims=True)
    page = page_of(replace(data, probs=probs, table=build_prediction_table(data.images.names, probs, probs)))
    assert "and 10" in " ".join(page.text.split())
    assert "cluster-10" not in page.ids


def test_names_that_look_like_html_are_shown_as_they_are(data):
    names = [f"{HOSTILE}{index}" for index in range(200)]
    hostile = replace(
        data,
        title=HOSTILE,
        facts=[(HOSTILE, HOSTILE)],
        rows=[(HOSTILE, None, data.rows[0][2])],
        diagrams=[(HOSTILE, data.diagrams[0][1])],
        images=replace(data.images, names=names, class_names=[HOSTILE] * 10, skipped=[(HOSTILE, HOSTILE)]),
        label_free={"warnings": [{"kind": "x", "text": HOSTILE}]},
        settings=HOSTILE,
        command=HOSTILE,
        outside=[{"data": HOSTILE, "images": 1, "scores": {"distance": SCORES}}],
        old_model={"writer": HOSTILE, "agreement_after": 0.5},
    )
    assert page_of(hostile).text.count(HOSTILE) >= 10


def test_what_was_noticed_during_training_is_told_there_and_pointed_at_in_short(data):
    noticed = [{"kind": "y", "text": f"After epoch {epoch}: shrinks.", "epoch": epoch} for epoch in (1, 3)]
    both = {"warnings": [{"kind": "x", "text": "Take care."}, *noticed]}
    short, _, rest = page_of(replace(data, label_free=both)).text.partition("Quality without labels")
    assert "Take care." in short
    assert "Training gave 2 warnings: see there." in short
    assert "After epoch" not in short
    assert rest.index("After epoch 1: shrinks.") < rest.index("After epoch 3: shrinks.")
    one = page_of(replace(data, label_free={"warnings": noticed[:1]})).text
    assert "Training gave a warning: see there." in one


def test_names_that_are_not_unicode_can_be_written(data):
    names = [f"caf\udce9 \x00 \ud800 {index}.png" for index in range(200)]
    odd = replace(data, title="\udcff", images=replace(data.images, names=names, skipped=[(names[0], "\x1b")]))
    text = render_page(odd).encode("utf-8").decode("utf-8")
    assert "caf\ufffd" in text
    assert not re.search("[\x00\x1b\ud800-\udfff]", text)


def test_a_page_without_labels_says_what_it_does_not_know(data):
    sizes, figures = {"cluster_sizes": [1]}, measure_head(data.probs, None)
    rows = [("k-means", sizes, sizes), ("clustering head", None, figures)]
    images = replace(data.images, labels=None)
    page = page_of(replace(data, images=images, rows=rows, diagrams=[("clustering head", figures)]))
    assert "whether they are right is known to labels alone" in page.text
    assert "Measured with the labels" not in page.text
    assert "accuracy:" not in page.text
    assert "k-means" not in page.text  # nothing of it was measured


def test_runs_of_before_lack_figures_and_get_a_shorter_page(data):
    old = {"ACC": 0.5, "CONF": 0.6}
    page = page_of(replace(data, rows=[("head", old, old)], diagrams=[("head", old)], label_free={}, history=[]))
    assert "figures" in page.ids
    assert not {"reliability", "training"} & set(page.ids)


def test_many_clusters_are_folded_and_few_are_not(data):
    probs = np.random.default_rng(0).dirichlet(np.full(50, 0.05), 200).astype(np.float32)
    many = replace(data, probs=probs, table=build_prediction_table(data.images.names, probs, probs))
    assert page_of(many).tags.count("details") > page_of(replace(data, settings=None)).tags.count("details") + 1


def test_of_many_unreadable_files_the_first_are_named_and_the_rest_counted(data):
    skipped = [(f"broken {index}", "truncated") for index in range(230)]
    page = page_of(replace(data, images=replace(data.images, skipped=skipped)))
    assert page.text.count("truncated") == 200
    assert "30 more are in report.json" in page.text
    assert "broken 199" in page.text
    assert "broken 200" not in page.text


def test_a_broken_promise_is_called_one(data):
    sure = np.full((200, 2), (0.999, 0.001), dtype=np.float32)
    half = replace(data.images, labels=np.arange(200) % 2)
    wrong = replace(data, probs=sure, table=build_prediction_table(half.names, sure, sure), images=half)
    assert "50.0 % of all images are right; the promise is not kept" in page_of(wrong).text


def test_flagged_outliers_are_counted(data):
    table = build_prediction_table(data.images.names, data.probs, data.probs, {"outlier": np.arange(200) < 5})
    assert "5 of 200 images (2.5 %)" in page_of(replace(data, table=table, outside=[])).text
    assert describe_outliers(data.table) is None


@pytest.mark.parametrize(("names", "called"), [(["cat", "dog"], ["dog", "cat"]), (None, ["class 1", "class 0"])])
def test_labels_name_clusters_and_say_how_many_are_right(data, names, called):
    # The third cluster is left without a class, the fourth is empty.
    probs = (np.eye(4)[[0, 0, 0, 1, 1, 2]] * 0.6 + 0.1).astype(np.float32)
    images = replace(data.images, labels=np.array([1, 1, 0, 0, 0, 0]), class_names=names)
    table = build_prediction_table(list("abcdef"), probs, probs)
    correct = np.array([True, True, False, True, True, False])
    figures = measure_clusters(replace(data, probs=probs, table=table, images=images), correct)
    assert [each.size for each in figures] == [3, 2, 1, 0]
    assert [each.confidence for each in figures] == [pytest.approx(0.7)] * 3 + [None]
    assert [each.class_name for each in figures] == [*called, None, None]
    assert [each.accuracy for each in figures] == [2 / 3, 1.0, None, None]


def test_models_side_by_side_with_and_without_labels_and_outside_data(data):
    figures = measure_head(data.probs, data.images.labels)
    first = record_of("first", figures, label_free={"balance": 0.5}, outside=data.outside)
    other = record_of(HOSTILE, {**figures, "ACC": 0.1}, label_free=data.label_free)
    page = Page(render_comparison([first, other]))
    assert {"figures", "reliability", "quality", "outside"} <= set(page.ids)
    for words in ("digits: first, ", HOSTILE, "Take care.", "balance of the sizes", "expected accuracy"):
        assert words in page.text
    page = Page(render_comparison([record_of("a", measure_head(data.probs, None), labels=False)]))
    assert "no accuracy and no calibration error" in page.text
    assert "outside" not in page.ids


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_contrast_enough(scheme):
    css = (files("cdc_plugin.report") / "templates" / "style.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css.split(":root {")[1 + scheme]))
    pairs = [(text, ground) for text in ("text", "muted", "accent") for ground in ("page", "surface")]
    for text, ground in [*pairs, ("text", "caution"), ("mark-text", "mark")]:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def contrast(first: str, second: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


OLD = {"writer": "SCAN", "clusters": 2, "CONF": 0.99, "agreement_before": 1.0, "agreement_after": 0.9}


def run_of(old_model=None) -> PageData:
    heads = {"kmeans": {}, "clustering_head": {"CONF": 0.9}, "calibration_head": {"CONF": 0.8}}
    images = ImageSet(np.zeros((3, 8, 8, 3), np.uint8), ["a", "b", "c"], skipped=[("d", "broken")], source="photos")
    measured = {"before": heads, "after": heads, "old_model": old_model, "label_free": {}}
    metrics = start_record("refinement", images, 2) | {"epochs": 2, "seed": 0, "seconds": 3.0, **measured}
    probs = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], dtype=np.float32)
    table = build_prediction_table(images.names, probs, probs)
    history = [{"epoch": 1, "seconds": 60.0}, {"epoch": 2, "seconds": 65.2}]
    return collect_page(metrics, table, probs, images, history=history, backbone="moco.pth", settings="", command=None)


def test_the_facts_count_all_epochs_and_an_old_model_comes_before_everything():
    plain, retrofit = run_of(), run_of(OLD)
    facts = dict(plain.facts)
    assert facts["images"] == "3 from photos, 1 could not be read"
    assert facts["training"] == "2 epochs, seed 0, 2 min 05 s"
    assert facts["labels"] == "none"
    assert [title for title, _, _ in plain.rows] == ["k-means on the features", "clustering head", "calibration head"]
    assert retrofit.rows[0] == ("old model (SCAN)", OLD, None)
    assert retrofit.rows[1:] == plain.rows
    assert retrofit.diagrams[0] == ("Old model", OLD)
    assert len(plain.diagrams) == 3
