"""The pages as text: what they say, what they leave out, and that nothing in them can run or load anything."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest

from cdc_plugin.data.images import ImageSet
from cdc_plugin.evaluation.prediction_table import add_column, build_prediction_table
from cdc_plugin.evaluation.report_record import measure_head, run_record
from cdc_plugin.report.models_page import render_comparison, write_comparison
from cdc_plugin.report.page_data import ComparedModel, PageData
from cdc_plugin.report.run_page import page_of_run, render_page, write_page
from cdc_plugin.report.words import outlier_words, percent

VOID = {"meta", "link", "img", "br", "hr"}
SCORES = {"AUROC": 0.9, "FPR95": 0.2, "AUPR": 0.8}
HOSTILE = "<script>alert('x')</script>\" onload=\"x()"


class Page(HTMLParser):
    """Reads a page: tags must be balanced; keeps text, ids, links and everything that could be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.ids, self.tags = "", [], []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        assert not any(name.startswith("on") for name in given), given
        self.ids += [given["id"]] if "id" in given else []
        target = given.get("src") or given.get("href")
        if target is not None:
            (self.links if tag == "a" else self.fetched).append(target)
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data.replace("\u00a0", " ") if "style" not in self.open else ""


@pytest.fixture
def findings(digits) -> PageData:
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


def page_of(findings: PageData) -> Page:
    return Page(render_page(findings, date(2025, 1, 2)))


def unlabelled(findings: PageData) -> PageData:
    figures = measure_head(findings.probs, None)
    return replace(
        findings,
        images=replace(findings.images, labels=None),
        rows=[("k-means", {"cluster_sizes": [1]}, {"cluster_sizes": [1]}), ("clustering head", None, figures)],
        diagrams=[("clustering head", figures)],
    )


def models(findings: PageData) -> list[ComparedModel]:
    figures = measure_head(findings.probs, findings.images.labels)
    worse = {**figures, "ACC": 0.1}
    return [
        ComparedModel("first", "cdc-refine", 10, [("calibration head", figures)], {"balance": 0.5}, findings.outside),
        ComparedModel(HOSTILE, "SCAN", 10, [("clustering head", worse)], findings.label_free, []),
    ]


def test_a_page_has_all_parts_and_every_link_leads_somewhere(findings):
    page = page_of(findings)
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    wanted = {"summary", "quality", "figures", "reliability", "caution", "training", "clusters", "gallery", "outside"}
    assert wanted | {"settings"} <= set(page.ids)
    for words in ("Take care.", "cdc-refine --clusters 10", "textures", "2025-01-02", "can’t tell without labels"):
        assert words in page.text


def test_an_empty_cluster_is_named_among_the_confused_but_not_linked(findings):
    # Every image leans a little towards a cluster that none is in.
    probs = np.concatenate([0.8 * findings.probs, np.full((200, 1), 0.2, dtype=np.float32)], axis=1)
    probs[probs.argmax(axis=1) == 10, 10] = 0.01
    probs /= probs.sum(axis=1, keepdims=True)
    page = page_of(replace(findings, probs=probs, table=build_prediction_table(findings.images.names, probs, probs)))
    assert "and 10" in " ".join(page.text.split())
    assert "cluster-10" not in page.ids
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


def test_nothing_is_fetched_and_nothing_runs(findings):
    text = render_page(findings, date.today())
    page = Page(text)
    assert "script" not in page.tags
    assert all(target.startswith("data:") for target in page.fetched)
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|url\((?!#)", text)


def test_names_that_look_like_html_are_shown_as_they_are(findings):
    names = [f"{HOSTILE}{index}" for index in range(200)]
    hostile = replace(
        findings,
        title=HOSTILE,
        facts=[(HOSTILE, HOSTILE)],
        rows=[(HOSTILE, None, findings.rows[0][2])],
        diagrams=[(HOSTILE, findings.diagrams[0][1])],
        images=replace(findings.images, names=names, class_names=[HOSTILE] * 10, skipped=[(HOSTILE, HOSTILE)]),
        label_free={"warnings": [{"kind": "x", "text": HOSTILE}]},
        settings=HOSTILE,
        command=HOSTILE,
        outside=[{"data": HOSTILE, "images": 1, "scores": {"distance": SCORES}}],
        old_model={"writer": HOSTILE, "agreement_after": 0.5},
    )
    page = page_of(hostile)
    assert "script" not in page.tags
    assert page.text.count(HOSTILE) >= 10


def test_what_was_noticed_during_training_is_told_there_and_pointed_at_in_short(findings):
    noticed = [{"kind": "y", "text": f"After epoch {epoch}: shrinks.", "epoch": epoch} for epoch in (1, 3)]
    both = {"warnings": [{"kind": "x", "text": "Take care."}, *noticed]}
    short, _, rest = page_of(replace(findings, label_free=both)).text.partition("Quality without labels")
    assert "Take care." in short
    assert "Training gave 2 warnings: see there." in short
    assert "After epoch" not in short
    assert rest.index("After epoch 1: shrinks.") < rest.index("After epoch 3: shrinks.")
    one = page_of(replace(findings, label_free={"warnings": noticed[:1]})).text
    assert "Training gave a warning: see there." in one


def test_names_that_are_not_unicode_can_be_written(findings, tmp_path):
    names = [f"caf\udce9 \x00 \ud800 {index}.png" for index in range(200)]
    odd = replace(findings, title="\udcff", images=replace(findings.images, names=names, skipped=[(names[0], "\x1b")]))
    write_page(tmp_path / "report.html", odd)
    text = (tmp_path / "report.html").read_bytes().decode("utf-8")
    assert "caf\ufffd" in text
    assert not re.search("[\x00\x1b\ud800-\udfff]", text)


def test_a_page_without_labels_says_what_it_does_not_know(findings):
    page = page_of(unlabelled(findings))
    assert "whether they are right is known to labels alone" in page.text
    assert "Measured with the labels" not in page.text
    assert "accuracy:" not in page.text
    assert "k-means" not in page.text  # nothing of it was measured


def test_runs_of_before_lack_figures_and_get_a_shorter_page(findings):
    old = {"ACC": 0.5, "CONF": 0.6}
    page = page_of(
        replace(findings, rows=[("head", old, old)], diagrams=[("head", old)], label_free={}, history=[], settings=None)
    )
    assert "figures" in page.ids
    assert not {"reliability", "training"} & set(page.ids)


def test_many_clusters_are_folded_and_few_are_not(findings):
    probs = np.random.default_rng(0).dirichlet(np.full(50, 0.05), 200).astype(np.float32)
    many = replace(findings, probs=probs, table=build_prediction_table(findings.images.names, probs, probs))
    assert page_of(many).tags.count("details") > page_of(replace(findings, settings=None)).tags.count("details") + 1


def test_of_many_unreadable_files_the_first_are_named_and_the_rest_counted(findings):
    skipped = [(f"broken {index}", "truncated") for index in range(230)]
    page = page_of(replace(findings, images=replace(findings.images, skipped=skipped)))
    assert page.text.count("truncated") == 200
    assert "30 more are in report.json" in page.text
    assert "broken 199" in page.text
    assert "broken 200" not in page.text


def test_a_broken_promise_is_called_one(findings):
    sure = np.full((200, 2), (0.999, 0.001), dtype=np.float32)
    half = replace(findings.images, labels=np.arange(200) % 2)
    wrong = replace(findings, probs=sure, table=build_prediction_table(half.names, sure, sure), images=half)
    assert "50.0 % of all images are right; the promise is not kept" in page_of(wrong).text
    assert "not kept" not in page_of(findings).text


def test_the_mark_can_be_seen_without_colour(findings):
    assert f"✓ {percent(findings.rows[0][2]['ECE'])}".replace("\u00a0", " ") in page_of(findings).text


def test_flagged_outliers_are_counted(findings):
    table = add_column(findings.table, "outlier", np.arange(200) < 5)
    assert "5 of 200 images (2.5 %)" in page_of(replace(findings, table=table, outside=[])).text
    assert outlier_words(findings.table) is None


def test_models_side_by_side(findings, tmp_path):
    write_comparison(tmp_path / "report.html", "two models", [("images", "200")], models(findings))
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert {"figures", "reliability", "quality", "outside"} <= set(page.ids)
    assert HOSTILE in page.text
    assert "script" not in page.tags
    assert "Take care." in page.text


def test_a_comparison_without_labels_and_outside_data(findings):
    figures = measure_head(findings.probs, None)
    found = [ComparedModel("a", "cdc-refine", 10, [("head", figures)], {}, [])]
    page = Page(render_comparison("x", [], found, date.today()))
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


PROBS = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], dtype=np.float32)
OLD = {"writer": "SCAN", "clusters": 2, "CONF": 0.99, "agreement_before": 1.0, "agreement_after": 0.9}


def run_of(old_model=None) -> PageData:
    heads = {"kmeans": {}, "clustering_head": {"CONF": 0.9}, "calibration_head": {"CONF": 0.8}}
    images = ImageSet(np.zeros((3, 8, 8, 3), np.uint8), ["a", "b", "c"], skipped=[("d", "broken")], source="photos")
    measured = {"before": heads, "after": heads, "old_model": old_model, "label_free": {}}
    metrics = run_record(images, clusters=2, epochs=2, seed=0, seconds=3.0, **measured)
    table = build_prediction_table(images.names, PROBS, PROBS)
    history = [{"epoch": 1, "seconds": 60.0}, {"epoch": 2, "seconds": 65.2}]
    return page_of_run(metrics, table, PROBS, images, history, backbone="moco.pth", settings="", command=None)


def test_the_facts_count_all_epochs_and_what_could_not_be_read():
    facts = dict(run_of().facts)
    assert facts["images"] == "3 from photos, 1 could not be read"
    assert facts["training"] == "2 epochs, seed 0, 2 min 05 s"
    assert facts["labels"] == "none"


def test_an_old_model_comes_before_everything():
    plain, retrofit = run_of(), run_of(OLD)
    assert [title for title, _, _ in plain.rows] == ["k-means on the features", "clustering head", "calibration head"]
    assert retrofit.rows[0] == ("old model (SCAN)", OLD, None)
    assert retrofit.rows[1:] == plain.rows
    assert retrofit.diagrams[0] == ("Old model", OLD)
    assert len(plain.diagrams) == 3
