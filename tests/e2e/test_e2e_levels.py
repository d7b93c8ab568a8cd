"""One run, several numbers of clusters: coarse groups have a confidence of their own, and the page shows them."""

import json

import numpy as np
import pytest

import cdc_plugin
from tests.helpers.commands import read_table, refuse, succeed
from tests.helpers.json_records import check_record

KINDS = np.repeat(np.arange(6), 40)  # 0 and 1 are like each other, 2 and 3, 4 and 5


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, noise = tmp_path_factory.mktemp("levels"), np.random.default_rng(0)
    centers = np.repeat(np.eye(3, 16), 2, axis=0) + 0.6 * np.eye(6, 16, k=6)
    np.savez(folder / "six.npz", features=centers[KINDS] + 0.1 * noise.normal(size=(240, 16)), y=KINDS)
    return folder / "six.npz", folder / "run"


@pytest.fixture(scope="module")
def run(files):
    source, folder = files
    succeed("refine", "--features", source, "--clusters", 6, "--out", folder, "epochs=5", "--quiet")
    return folder


def test_a_run_states_how_its_clusters_merge_and_predicts_at_every_level(run, files, tmp_path):
    record = json.loads((run / "report.json").read_text())
    check_record(record, "refinement")
    assert len(record["hierarchy"]["merges"]) == 5
    accuracy = {}
    for level in (6, 3, 1):
        words = ("--model", run, "--features", files[0], "--out", tmp_path / f"{level}.csv", "--level", level)
        succeed("predict", *words)
        rows = read_table(tmp_path / f"{level}.csv")
        assert {int(row["cluster"]) for row in rows} == set(range(level))
        groups = np.array([int(row["cluster"]) for row in rows])
        truth = KINDS * level // 6 if level < 6 else KINDS
        common = [np.bincount(truth[groups == group]).max() for group in range(level)]
        accuracy[level] = sum(common) / len(rows)
        assert all(float(row["confidence"]) >= float(row["leaf_confidence"]) for row in rows)
    assert accuracy[3] > 0.98
    assert accuracy[1] == 1
    words = ("predict", "--model", run, "--features", files[0], "--out", tmp_path / "x.csv", "--level")
    assert "1 to 6" in refuse(*words, 7)
    found = cdc_plugin.load_model(run).predict_proba(files[0], level=3)
    np.testing.assert_allclose(
        found.max(axis=1), [float(row["confidence"]) for row in read_table(tmp_path / "3.csv")], atol=1e-5
    )


def test_the_tree_is_on_the_page_and_fits_a_desk_and_a_phone(run, browser):
    for width in (1280, 390):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto((run / "report.html").as_uri())
        assert page.locator("#levels .tree ol > li").count() == 6
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        rows = page.locator("#levels .tree ol > li").evaluate_all(
            "all => all.map(one => one.getBoundingClientRect().y)"
        )
        drawn = page.locator("#levels .tree svg").bounding_box()
        assert drawn["y"] < rows[0]
        assert drawn["y"] + drawn["height"] >= rows[-1] + 50  # branches end at their rows
        page.close()
