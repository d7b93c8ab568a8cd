from pathlib import Path

import numpy as np
import pytest

from cdc_plugin.cli.evaluate import cautions, outcome
from cdc_plugin.evaluation.records import Report


def metrics(acc: float | None = 0.7, conf: float = 0.9, heads: int = 1, **others) -> dict:
    figures = {"CONF": conf, "cluster_sizes": [5, 5]} | ({} if acc is None else {"ACC": acc, "ECE": 0.2})
    kmeans = {"cluster_sizes": [5, 5]} | ({} if acc is None else {"ACC": 0.65})
    after = {"kmeans": kmeans, "model": figures}
    if heads == 2:
        after = {"kmeans": kmeans, "clustering_head": figures, "calibration_head": figures}
    model = {"name": "old", "path": "my scan.pth.tar", "heads": heads, "options": ["--head", "2"]}
    card = {"expected_accuracy": conf, "warnings": []}
    labels = {"labels": acc is not None, "classes": None if acc is None else 2}
    rest = {"images": 10, "clusters": 2, "data": "photos", "outside": [], "skipped": []}
    return {"model": model, "after": after, "label_free": card, **labels, **rest, **others}


def report(content: dict) -> Report:
    return Report(content, np.recarray(0, dtype=[("cluster", int)]), Path("out"))


def test_an_over_confident_old_model_is_named_with_the_command_that_mends_it():
    (line,) = cautions(metrics(acc=0.7, conf=0.9))
    assert "over-confident: it states 90.0% on average, 70.0% of the images are right" in line
    assert line.endswith("cdc-refine --backbone 'my scan.pth.tar' --head 2 --data photos --init keep")


@pytest.mark.parametrize(("acc", "conf"), [(0.86, 0.9), (0.95, 0.5)])
def test_a_model_that_is_truthful_or_too_careful_is_not_called_over_confident(acc, conf):
    assert cautions(metrics(acc, conf)) == []


def test_a_refined_model_is_not_sent_to_be_refined_again():
    (line,) = cautions(metrics(heads=2))
    assert "over-confident" in line
    assert "cdc-refine" not in line


def test_without_labels_the_card_alone_warns():
    card = {"expected_accuracy": 0.9, "warnings": [{"kind": "empty", "text": "1 cluster is empty."}]}
    assert cautions(metrics(acc=None, label_free=card)) == ["warning: 1 cluster is empty."]


def test_unequal_numbers_of_classes_and_clusters_are_pointed_out():
    found = cautions(metrics(acc=0.9, classes=3))
    assert found == ["note: the images have 3 classes, the model 2 clusters; ACC pairs them one to one"]


def test_the_table_has_a_row_a_head_and_one_for_k_means():
    lines = outcome([report(metrics(heads=2))]).splitlines()
    assert lines[1].split() == ["in", "%", "ACC", "NMI", "ARI", "ECE", "CONF"]
    assert [line.split()[-5:] for line in lines[2:5]] == [
        ["65.0", "-", "-", "-", "-"],
        ["70.0", "-", "-", "20.0", "90.0"],
        ["70.0", "-", "-", "20.0", "90.0"],
    ]
    assert "10 images in 2 clusters; expected accuracy 90.0% (mean confidence)" in lines


def test_without_labels_k_means_has_nothing_to_show():
    text = outcome([report(metrics(acc=None))])
    assert "k-means" not in text
    assert "ACC" not in text


def test_compared_models_are_named_in_every_row():
    scores = {"model": {"AUROC": 0.5, "FPR95": 0.9, "AUPR": None}, "distance": {"AUROC": 1.0}}
    outside = [{"data": "far/textures.npz", "images": 60, "scores": scores}]
    second = metrics(outside=outside)
    second["model"] = {**second["model"], "name": "new"}
    lines = outcome([report(metrics(outside=outside)), report(second)]).splitlines()
    assert sum(line.startswith("old: ") for line in lines) == sum(line.startswith("new: ") for line in lines) == 6
    assert "told from 60 images of textures.npz, in %    AUROC  FPR95   AUPR" in lines
    assert [line.split() for line in lines if "new: by" in line] == [
        ["new:", "by", "confidence", "50.0", "90.0", "-"],
        ["new:", "by", "distance", "100.0", "-", "-"],
    ]


def test_unread_images_are_counted():
    found = cautions(metrics(acc=0.9, skipped=[{"image": "a.png", "reason": "broken"}]))
    assert found == ["1 image could not be read; report.json names it"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "missing --model"),
        (["--model", "a", "--names", "b"], "give these with --compare"),
        (["--compare", "a", "--quiet"], "at least two models"),
        (["--model", "/no/such/model", "--quiet"], "there is no model"),
    ],
)
def test_what_is_missing_or_does_not_go_together_is_told(refuse, words, reason):
    assert reason in refuse("evaluate", *words)
