import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cdc_plugin
from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.data.images import open_images
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation import evaluate as assessment
from cdc_plugin.evaluation.evaluate import (
    ModelOutputs,
    compare,
    evaluate,
    measure_inside,
    quality_card,
    run_model,
    score_outside,
)
from cdc_plugin.evaluation.models import open_model
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead
from tests.helpers.commands import names_in, read_table
from tests.helpers.json_records import check_record

FILES = {"report.html", "report.json", "predictions.csv"}
WITH_LABELS = {"ACC", "NMI", "ARI", "ECE", "AECE", "CECE", "BRIER", "NLL", "AUROC", "AURC", "FPR95"}


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def archive(tmp_path_factory, digits) -> Path:
    path = tmp_path_factory.mktemp("archive") / "digits.npz"
    np.savez(path, x=digits[0][:60], y=digits[1][:60] % 3)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, archive, tiny_checkpoint) -> Path:
    """A real run of one epoch on 60 digits, in 3 clusters."""
    out = tmp_path_factory.mktemp("runs") / "photos"
    small = {"hidden": 16, "batch_size": 30, "sub_batch_size": 15, "mini_clusters": 8, "epochs": 1}
    cdc_plugin.refine(tiny_checkpoint, archive, 3, out=out, device="cpu", **small)
    return out


@pytest.fixture
def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)


def test_a_run_on_its_own_images_gets_the_figures_that_it_reported(finished, tmp_path):
    report = evaluate(finished, out=tmp_path / "again", device="cpu")
    own = json.loads((finished / "report.json").read_text())
    assert names_in(tmp_path / "again") == FILES
    for key in ("before", "after", "label_free", "images", "clusters", "labels"):
        assert report.metrics[key] == own[key], key
    assert json.loads((tmp_path / "again" / "report.json").read_text()) == report.metrics
    check_record(own, "refinement")
    check_record(report.metrics, "evaluation")
    assert (tmp_path / "again" / "predictions.csv").read_bytes() == (finished / "predictions.csv").read_bytes()
    page = (tmp_path / "again" / "report.html").read_text(encoding="utf-8")
    assert "mini_clusters: 8" in page
    assert "at the start" in page


@pytest.mark.parametrize(
    "content",
    [{"label_free": {"warnings": "none"}}, {"label_free": {"warnings": [7]}, "before": "good"}, {"label_free": None}],
)
def test_figures_of_a_run_that_are_none_are_left_out(finished, archive, tmp_path, content, caplog):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "report.json").write_text(json.dumps({"labels": True, **content}))
    with caplog.at_level("WARNING", "cdc_plugin"):
        record = evaluate(folder, archive, out=tmp_path / "out", device="cpu").metrics
    assert "not as cdc-refine writes it" in caplog.text
    check_record(record, "evaluation")
    assert record["before"] is None


def test_other_images_are_measured_by_the_prototypes_and_not_compared_with_the_start(finished, tmp_path, digits):
    report = evaluate(finished, digits[0][60:100], out=tmp_path / "new", device="cpu")
    table, prototypes = report.predictions, load_model(finished).prototypes
    assert (table["outlier"] == (table["distance"] > prototypes.limit)).all()
    assert np.isfinite(table["distance"]).all()
    assert (report.metrics["before"], report.metrics["old_model"], report.metrics["labels"]) == (None, None, False)
    page = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert "mini_clusters: 8" not in page
    assert "at the start" not in page
    assert report.metrics["label_free"]["stability"] is None


def test_without_labels_no_figure_that_needs_them_is_left_and_a_place_is_chosen(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reports = [evaluate(finished, labels=False, device="cpu") for _ in range(2)]
    metrics = reports[0].metrics
    assert (metrics["labels"], metrics["classes"], metrics["before"]) == (False, None, None)
    assert not WITH_LABELS & {name for figures in metrics["after"].values() for name in figures}
    assert [str(report.folder) for report in reports] == [f"cdc-runs/photos-evaluation-{n}" for n in (1, 2)]


def test_an_old_clustering_model_is_shown_once_as_it_is(scan_checkpoint, archive, tmp_path):
    report = evaluate(scan_checkpoint, archive, out=tmp_path / "out", device="cpu")
    assert list(report.metrics["after"]) == ["kmeans", "model"]
    assert report.metrics["after"]["model"].keys() >= WITH_LABELS
    assert report.metrics["model"]["writer"] == "SCAN (clustering)"
    with np.load(archive) as stored:
        expected = load_model(scan_checkpoint).predict_proba(stored["x"])
    rows = read_table(tmp_path / "out" / "predictions.csv")
    assert report.metrics["after"]["model"]["CONF"] == pytest.approx(expected.max(axis=1).mean(), abs=1e-5)
    assert len(set(expected.argmax(axis=1))) > 1
    assert [int(row["cluster"]) for row in rows] == expected.argmax(axis=1).tolist()
    np.testing.assert_allclose([float(row["confidence"]) for row in rows], expected.max(axis=1), atol=1e-5)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "the model as it is" in page
    assert f"cdc-evaluate --model {scan_checkpoint} --data {archive}" in page


def test_outside_images_are_scored_by_both_heads_and_by_distance(finished, tmp_path, noise):
    report = evaluate(finished, ood=[noise, noise[:5]], out=tmp_path / "out", device="cpu")
    assert [entry["images"] for entry in report.metrics["outside"]] == [12, 5]
    for entry in report.metrics["outside"]:
        assert list(entry["scores"]) == ["clustering_head", "calibration_head", "distance"]
        assert all(0 <= value <= 1 for figures in entry["scores"].values() for value in figures.values())
    np.save(tmp_path / "noise.npy", noise)
    for number, given in enumerate((noise, str(tmp_path / "noise.npy"))):  # one set need not be in a list
        again = evaluate(finished, ood=given, out=tmp_path / str(number), device="cpu")
        assert again.metrics["outside"][0]["scores"] == report.metrics["outside"][0]["scores"]


def test_a_mistyped_outside_set_is_told_before_any_image_is_read(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(assessment, "read_images", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(UserError, match="nothing at /no/such/place"):
        evaluate(finished, ood=["/no/such/place"], out=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_three_images_are_enough_for_two_clusters_and_one_is_not(tiny_backbone, digits, tmp_path):
    head = ClusterHead(8, 12, 2)
    model = Clusterer(tiny_backbone, head, head)
    report = evaluate(model, digits[0][:3], ood=[digits[0][:1]], out=tmp_path / "few", device="cpu")
    assert report.metrics["images"] == 3
    assert names_in(tmp_path / "few") == FILES
    with pytest.raises(UserError, match="1 readable images, too few to evaluate 2 clusters"):
        evaluate(model, digits[0][:1], out=tmp_path / "one", device="cpu")


def test_a_checkpoint_of_others_needs_images_and_a_result_states_its_own_head(scan_checkpoint, finished, tmp_path):
    with pytest.raises(UserError, match=r"which images.*data="):
        evaluate(scan_checkpoint, out=tmp_path / "out")
    with pytest.raises(UserError, match="leave head=1 out"):
        evaluate(finished, head=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_given_for_the_report_loses_nothing_but_an_older_report(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = bytes_in(folder)
    with pytest.raises(UserError, match=r"not empty.*overwrite=True.* report\.html, report\.json, predictions\.csv"):
        evaluate(folder, out=folder, device="cpu")
    assert bytes_in(folder) == before
    evaluate(folder, out=folder, overwrite=True, device="cpu")
    after = bytes_in(folder)
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} <= FILES
    again = evaluate(folder, out=folder, overwrite=True, device="cpu")  # from a report of its own kind
    assert again.metrics["before"] == json.loads(before["report.json"])["before"]


def test_models_that_differ_in_everything_are_compared_on_the_same_images(
    finished, scan_checkpoint, tiny_backbone, tmp_path, noise
):
    other = Clusterer(tiny_backbone, ClusterHead(8, 12, 2), ClusterHead(8, 12, 2))
    other.backbone.input_size = 24
    out = tmp_path / "out"
    models, names = [scan_checkpoint, finished, other], ["old", "new", "mine"]
    reports = compare(models, ood=[noise], out=out, names=names, device="cpu")
    assert names_in(out) == {*names, "report.html", "report.json"}
    assert all(names_in(out / name) == FILES for name in names)
    assert [report.metrics["clusters"] for report in reports] == [4, 3, 2]
    assert {report.metrics["data"] for report in reports} == {reports[1].metrics["data"]}
    stored = json.loads((out / "report.json").read_text())
    check_record(stored, "model_comparison")
    assert [entry["model"]["name"] for entry in stored["models"]] == names
    alone = evaluate(finished, ood=[noise], out=tmp_path / "alone", device="cpu")
    assert stored["models"][1]["after"] == alone.metrics["after"]
    assert stored["models"][1]["outside"] == alone.metrics["outside"]


@pytest.mark.parametrize(
    ("names", "reason"),
    [(["a"], "2 models"), (["a", "a"], "different names"), (["a", "b/c"], "slash"), (["..", "a"], "slash")],
)
def test_a_comparison_takes_two_models_with_names_that_can_be_folders(finished, scan_checkpoint, names, reason):
    with pytest.raises(UserError, match=reason):
        compare([finished, scan_checkpoint], names=names)
    with pytest.raises(UserError, match="at least two models"):
        compare([finished])


def test_facts_that_a_checkpoint_leaves_open_are_settled_by_the_images(scan_checkpoint, archive, tmp_path, monkeypatch):
    asked = []

    def settle(backbone, images):
        asked.append((backbone.inferred, len(images)))
        return backbone

    monkeypatch.setattr(assessment, "resolve_input", settle)
    evaluate(scan_checkpoint, archive, out=tmp_path / "out", device="cpu")
    assert asked == [(load_model(scan_checkpoint).backbone.inferred, 60)]


CPU = torch.device("cpu")


def sure(*confidences: float) -> np.ndarray:
    return np.array([[value, 1 - value] for value in confidences], dtype=np.float32)


def build_outputs(features: torch.Tensor, clusters: int = 2) -> ModelOutputs:
    probs = np.eye(clusters, dtype=np.float32)[np.arange(len(features)) // 2 % clusters]
    return ModelOutputs(features, {"clustering_head": probs, "calibration_head": probs})


def open_clusterer(backbone, *heads: nn.Module):
    return open_model(Clusterer(backbone, heads[0], heads[-1]))


def test_each_head_answers_for_itself_and_one_head_does_not_praise_its_agreement_with_itself(tiny_backbone, digits):
    torch.manual_seed(1)
    first, second = (ClusterHead(8, 12, 3).eval() for _ in range(2))
    evaluated = [open_clusterer(tiny_backbone, *heads) for heads in ((first, second), (second,))]
    images = open_images(digits[0][:30], 32)
    both, one = outputs = [run_model(model, images, CPU) for model in evaluated]
    assert list(both.heads) == ["clustering_head", "calibration_head"]
    assert list(one.heads) == ["model"]
    with torch.no_grad():
        expected = second(both.features).softmax(dim=1).numpy()
    np.testing.assert_allclose(both.calibration, expected, atol=1e-6)
    np.testing.assert_array_equal(one.calibration, both.calibration)
    assert not np.allclose(both.clustering, both.calibration)
    two_heads, one_head = (
        quality_card(model, found, found.calibration.argmax(axis=1), images, CPU)
        for model, found in zip(evaluated, outputs, strict=True)
    )
    assert two_heads["heads_agree"] is not None
    assert (one_head["heads_agree"], one_head["clustering_confidence"], one_head["stability"]) == (None, None, None)
    assert one_head["kmeans_agreement"] == 1.0
    assert one_head["expected_accuracy"] == two_heads["expected_accuracy"]
    assert one_head["warnings"][0]["kind"] == "uncalibrated"
    assert "uncalibrated" not in {warning["kind"] for warning in two_heads["warnings"]}


def test_features_that_are_not_finite_are_refused(tiny_backbone, digits):
    next(tiny_backbone.parameters()).data.fill_(math.nan)
    with pytest.raises(UserError, match="not finite"):
        run_model(open_clusterer(tiny_backbone, ClusterHead(8, 12, 3)), open_images(digits[0][:4], 32), CPU)


def test_confidence_tells_outside_images_by_pairs_counted_by_hand():
    inside = ModelOutputs(
        torch.eye(4), {"clustering_head": sure(0.9, 0.8, 0.9, 0.8), "calibration_head": sure(*[0.9] * 4)}
    )
    outside = ModelOutputs(torch.eye(4)[:2], {"clustering_head": sure(0.6, 0.85), "calibration_head": sure(0.6, 0.9)})
    scores = score_outside(inside, outside, *measure_inside(inside, None))
    assert list(scores) == ["clustering_head", "calibration_head", "distance"]
    assert scores["clustering_head"]["AUROC"] == 0.75  # 0.9 beats both, 0.8 beats 0.6 alone
    assert scores["calibration_head"]["AUROC"] == 0.75  # 0.6 is beaten, 0.9 is a tie
    assert scores["clustering_head"]["FPR95"] == 0.5  # all inside images are kept from 0.8 on; 0.85 gets in
    assert set(scores["distance"]) == {"AUROC", "FPR95", "AUPR"}


def test_every_image_is_measured_by_prototypes_of_the_other_half_or_by_given_ones(randomness):
    features = torch.randn(40, 5, generator=randomness)
    outputs = build_outputs(features)
    assignment = torch.from_numpy(outputs.calibration.argmax(axis=1))
    even, odd = (fit_prototypes(features[start::2], assignment[start::2], 2) for start in (0, 1))
    distance, halves = measure_inside(outputs, None)
    torch.testing.assert_close(distance[0::2], odd.distance(features[0::2]))
    torch.testing.assert_close(distance[1::2], even.distance(features[1::2]))
    other = torch.randn(7, 5, generator=randomness)
    for found, expected in zip(halves, (even, odd), strict=True):
        torch.testing.assert_close(found.distance(other), expected.distance(other))
    distance, (same,) = measure_inside(build_outputs(other), even)
    assert same is even
    torch.testing.assert_close(distance, even.distance(other))
    mean = torch.stack([even.distance(other), odd.distance(other)]).mean(dim=0)
    scores = score_outside(outputs, build_outputs(other), mean, halves)["distance"]
    assert scores["AUROC"] == 0.5  # the outside images have the mean of both distances: just those of the inside


def test_images_of_the_same_kind_are_not_told_apart_however_many_features_there_are(randomness):
    inside, outside = (torch.randn(count, 200, generator=randomness) for count in (100, 300))
    outputs = build_outputs(inside)
    fair = score_outside(outputs, build_outputs(outside), *measure_inside(outputs, None))["distance"]["AUROC"]
    assignment = torch.from_numpy(outputs.calibration.argmax(axis=1))
    own = measure_inside(outputs, fit_prototypes(inside, assignment, 2))
    flattering = score_outside(outputs, build_outputs(outside), *own)["distance"]["AUROC"]
    assert fair == pytest.approx(0.5, abs=0.1)
    assert flattering > 0.9
