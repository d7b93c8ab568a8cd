"""The pages in a real browser: they open quietly, fetch nothing, fit a phone and a desk, and need no script."""

from pathlib import Path

import numpy as np
import pytest

from cdc_plugin.data.atomic import write_text
from cdc_plugin.data.images import ImageSet
from cdc_plugin.evaluation.records import build_prediction_table, measure_head
from cdc_plugin.report.models_page import render_comparison
from cdc_plugin.report.page_data import PageData
from cdc_plugin.report.run_page import render_page

PHONE, DESK = 360, 1280
LIMIT = 8_000_000  # bytes
SCORES = {
    "calibration_head": {"AUROC": 0.9, "FPR95": 0.2, "AUPR": 0.8},
    "distance": {"AUROC": 1, "FPR95": 0, "AUPR": 1},
}
# Pairs of texts of one drawing whose boxes share more than a hair.
OVERLAPS = """() => [...document.querySelectorAll('svg.chart')].flatMap(drawing => {
  const boxes = [...drawing.querySelectorAll('text')]
    .map(text => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width > 0);
  return boxes.flatMap(([one, a], at) => boxes.slice(at + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
    .map(([other]) => `${one} | ${other}`));
})"""


def findings_of(pixels: np.ndarray, labels: np.ndarray | None, clusters: int, name: str) -> PageData:
    random = np.random.default_rng(0)
    likely = random.integers(0, clusters, len(pixels)) if labels is None else labels
    logits = (
        random.normal(size=(len(pixels), clusters)) + random.gamma(4, 2, (len(pixels), 1)) * np.eye(clusters)[likely]
    )
    probs = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(np.float32)
    names = [f"{name} {index}.png" for index in range(len(pixels))]
    figures = measure_head(probs, labels)
    card = dict.fromkeys(("expected_accuracy", "heads_agree", "balance", "stability"), 0.9)
    return PageData(
        title=f"{name} in {clusters} clusters",
        facts=[("images", name)],
        rows=[("k-means on the features", {"ACC": 0.5}, {"ACC": 0.6}), ("calibration head", figures, figures)],
        diagrams=[("calibration head", figures), ("clustering head", figures)],
        label_free={**card, "warnings": [{"kind": "empty", "text": "A cluster is empty."}]},
        table=build_prediction_table(names, probs, probs, {"outlier": np.arange(len(pixels)) < 3}),
        probs=probs,
        images=ImageSet(pixels, names, labels, skipped=[(name, "truncated")] * 300),
        history=[
            {"epoch": epoch, "clustering_loss": 1 / epoch, "selected": 0.5, "mini_clusters": 20}
            for epoch in range(1, 31)
        ],
        settings=f"clusters: {clusters}",
        command=f"cdc-refine --data '{name}'",
        outside=[{"data": name, "images": 600, "scores": SCORES}],
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory, digits) -> dict[str, Path]:
    """A labelled run; 200 clusters of pictures that do not compress, with names without end; models side by side."""
    folder = tmp_path_factory.mktemp("pages")
    pixels, labels = digits
    found = {name: folder / f"{name}.html" for name in ("labelled", "many", "comparison")}
    write_text(found["labelled"], render_page(findings_of(pixels, labels, 10, "digits")))
    noise = np.random.default_rng(0).integers(0, 256, (1000, 32, 32, 3), dtype=np.uint8)
    write_text(found["many"], render_page(findings_of(noise, None, 200, "W" * 400)))
    figures = measure_head(findings_of(pixels, labels, 10, "").probs, labels)
    record = {"data": "digits", "images": 200, "classes": 10, "labels": True, "clusters": 10, "outside": []}
    record |= {"after": {"clustering_head": figures}, "label_free": {"balance": 0.5}}
    names = ("W" * 200, "b")
    models = [{**record, "model": {"name": name, "writer": "SCAN", "path": None}} for name in names]
    write_text(found["comparison"], render_comparison(models))
    return found


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "light"), (DESK, "dark")])
@pytest.mark.parametrize("name", ["labelled", "many", "comparison"])
def test_a_page_opens_quietly_fetches_nothing_and_fits(browser, pages, name, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(pages[name].as_uri())
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [pages[name].as_uri()]
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    assert page.evaluate(OVERLAPS) == []
    broken = "[...document.images].filter(image => image.complete && image.naturalWidth == 0).length"
    assert page.evaluate(broken) == 0
    assert pages[name].stat().st_size < LIMIT
    context.close()


def test_folding_works_without_javascript_and_paper_shows_what_is_folded(browser, pages):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["many"].as_uri())
    settings = page.locator("#settings details pre")
    assert not settings.is_visible()
    page.locator("#settings summary").click()
    assert settings.is_visible()
    page.reload()
    page.emulate_media(media="print")
    assert page.locator("#settings details pre").bounding_box()["height"] > 10
    assert page.locator("nav").is_hidden()
    context.close()
