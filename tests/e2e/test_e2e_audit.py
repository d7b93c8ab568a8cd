"""An audit as people do it: draw images, answer them in a browser, have the answers counted."""

import csv

import pytest
import torch

from cdc_plugin.checkpoints.load import load_backbone
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead
from tests.helpers.commands import names_in, read_table, refuse, succeed

DRAWN = 12


@pytest.fixture(scope="module")
def audit(tmp_path_factory, archive, tiny_checkpoint):
    """The folder of an audit of 200 digits, what was typed for it, and what was printed."""
    folder = tmp_path_factory.mktemp("audit")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = [ClusterHead(8, 12, 2) for _ in range(2)]
    Clusterer(load_backbone(tiny_checkpoint), *heads).save(folder, {})
    words = ["predict", "--model", folder, "--data", archive, "--device", "cpu", "--audit", DRAWN]
    words += ["--min-confidence", 0.5, "--out", folder / "check"]
    return folder / "check", words, succeed(*words).stdout


def test_an_audit_is_two_files_and_is_not_overwritten(audit):
    folder, words, printed = audit
    assert names_in(folder) == {"audit.csv", "audit.html"}
    assert f"{DRAWN} of 200 images" in printed
    rows = read_table(folder / "audit.csv")
    assert list(rows[0]) == ["id", "index", "cluster", "answer", "confidence", "selected", "audit"]
    assert len(rows) == DRAWN == len({row["id"] for row in rows})
    assert "perhaps with answers" in refuse(*words)
    assert "holds no answers" in refuse("predict", "--answers", folder)


def test_answers_written_into_the_table_are_counted(audit, tmp_path):
    rows = read_table(audit[0] / "audit.csv")
    for row, answer in zip(rows, ["ja"] * 9 + ["nein"] * 3, strict=True):
        row["answer"] = answer
    with open(tmp_path / "excel.csv", "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=";")
        writer.writeheader()
        writer.writerows(rows)
    printed = succeed("predict", "--answers", tmp_path / "excel.csv").stdout
    assert "12 of 12 images answered, drawn from 200" in printed
    assert "accuracy: 75.0% (9 of 12 right), with 95% certainty between 42.8% and 94.5%" in printed


def test_answers_given_in_a_browser_are_kept_and_saved_as_a_table(audit, browser, tmp_path):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
    page.goto((audit[0] / "audit.html").as_uri())
    position = page.locator("#position")
    assert position.inner_text() == f"Image 1 of {DRAWN}, 0 answered"
    page.keyboard.press("n")
    page.keyboard.press("ArrowLeft")
    assert page.locator("button.no").get_attribute("aria-pressed") == "true"
    page.keyboard.press("y")  # the second thought counts
    page.keyboard.press("u")
    page.get_by_role("button", name="No").click()
    assert position.inner_text() == f"Image 4 of {DRAWN}, 3 answered"

    page.reload()
    assert position.inner_text() == f"Image 4 of {DRAWN}, 3 answered"
    images = page.locator("main img")
    assert images.count() == 9
    assert all(image.evaluate("image => image.naturalWidth") > 0 for image in images.all())
    visible = page.locator("body").inner_text()
    assert not any(row["confidence"] in visible for row in read_table(audit[0] / "audit.csv"))
    page.set_viewport_size({"width": 375, "height": 667})
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0

    for _ in range(DRAWN - 3):
        page.keyboard.press("y")
    assert page.locator("#outcome").inner_text() == "10 yes, 1 no, 1 can't tell"
    with page.expect_download() as download:
        page.get_by_role("button", name="Save audit.csv").click()
    assert download.value.suggested_filename == "audit.csv"
    download.value.save_as(tmp_path / "audit.csv")
    page.close()
    assert complaints == []

    saved, fresh = read_table(tmp_path / "audit.csv"), read_table(audit[0] / "audit.csv")
    assert [row["answer"] for row in saved] == ["yes", "?", "no", *["yes"] * 9]
    assert [{**row, "answer": ""} for row in saved] == fresh
    printed = succeed("predict", "--answers", tmp_path).stdout
    assert "11 of 12 images answered" in printed
    assert "accuracy: 90.9% (10 of 11 right)" in printed
