"""Features that others have computed go the whole way that images go."""

import json
import re

import numpy as np
import pytest

import cdc_plugin
from cdc_plugin.errors import DataError
from tests.helpers.commands import read_table, refuse, succeed
from tests.helpers.json_records import check_record

CLASSES = np.repeat(np.arange(4), 50)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two spaces of the same 200 texts in four groups, the second far larger in scale and without a name."""
    folder, noise = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    first, second = (np.eye(4, size, dtype=np.float32)[CLASSES] for size in (12, 20))
    names = np.array([f"text {number}" for number in range(200)])
    np.savez(folder / "first.npz", features=first + 0.2 * noise.normal(size=first.shape), y=CLASSES, ids=names)
    np.save(folder / "second.npy", (1e3 * (second + 0.2 * noise.normal(size=second.shape))).astype(np.float16))
    return folder / "first.npz", folder / "second.npy"


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "results"
    done = succeed("refine", "--features", *files, "--clusters", 4, "--out", folder, "epochs=3")
    assert "samples" in find_words(done)
    return folder


def find_words(done, *pages):
    """Return the nouns that a command and the pages it wrote, without their style, call what was clustered."""
    texts = [
        done.stdout,
        done.stderr,
        *(re.sub("<style.*?</style>", "", page.read_text(), flags=re.S) for page in pages),
    ]
    texts = [re.sub("<[^>]*>", " ", text) for text in texts]
    return set(re.findall(r"\b(?:image|sample)s?\b", " ".join(texts).lower()))


def test_a_run_on_features_writes_what_a_run_on_images_writes(run):
    record = json.loads((run / "report.json").read_text())
    check_record(record, "refinement")
    assert record["after"]["calibration_head"]["ACC"] > 0.95
    assert record["label_free"]["augmentation_agreement"] is None
    assert [space["numbers"] for space in record["spaces"]] == [12, 20]
    assert all(space["agreement"] > 0.9 for space in record["spaces"])
    page = (run / "report.html").read_text()
    assert "text 17" in page or "text 70" in page
    assert 'src=""' not in page


def test_every_command_speaks_of_samples_where_there_are_only_vectors(run, files, tmp_path):
    model = ["--model", run]
    assert not {"image", "images"} & find_words(succeed("refine", "--features", *files, "--clusters", 4, "--dry-run"))
    words = find_words(succeed("evaluate", *model, "--out", tmp_path / "known"), tmp_path / "known" / "report.html")
    words |= find_words(succeed("predict", *model, "--features", *files, "--out", tmp_path / "new.csv"))
    both = ["--compare", run, run, "--names", "one", "two", "--out", tmp_path / "both"]
    words |= find_words(succeed("evaluate", *both), tmp_path / "both" / "report.html")
    grid = ["--features", *files, "--clusters", 4, "--methods", "kmeans,cdc", "--seeds", 1, "--epochs", 1, "--jobs", 1]
    done = succeed("compare", *grid, "--out", tmp_path / "grid")
    words |= find_words(done, tmp_path / "grid" / "report.html", run / "report.html")
    check = succeed("predict", *model, "--features", *files, "--audit", 10, "--out", tmp_path / "check")
    words |= find_words(check)
    sheet = tmp_path / "check" / "audit.csv"
    sheet.write_text(re.sub(r"(?m)^(r\d+-\w+,[^,]*,\d+),,", r"\1,yes,", sheet.read_text()))
    words |= find_words(succeed("predict", "--answers", tmp_path / "check"))
    assert words == {"sample", "samples"}
    assert json.loads((run / "report.json").read_text())["noun"] == "sample"


def test_features_are_inspected_alone_together_and_against_a_model(run, files, tmp_path):
    rows = np.load(files[1]).astype(np.float32)
    found = json.loads(succeed("inspect", "--features", *files, "--json").stdout)
    check_record(found, "inspection")
    assert [space["dimension"] for space in found["features"]["spaces"]] == [12, 20]
    assert found["features"]["correspondence"][0]["words"] == "the rows correspond"
    np.save(tmp_path / "mixed.npy", np.random.default_rng(0).permutation(rows))
    mixed = cdc_plugin.inspect(features=[files[0], tmp_path / "mixed.npy"])
    assert mixed["features"]["correspondence"][0]["words"].startswith("no sign")
    rows[3], rows[:, 1] = rows[4], 7
    odd = cdc_plugin.inspect(features=rows)["features"]["spaces"][0]
    assert (odd["duplicates"], odd["constant_columns"], odd["not_finite"]) == (1, 1, 0)
    rows[5, 5] = np.nan
    assert not cdc_plugin.inspect(features=rows)["loadable"]
    known, turned = (cdc_plugin.inspect(run, features=spaces) for spaces in (files, [-rows[:4, :12], rows[:4]]))
    assert known["loadable"]
    assert known["features"]["model"]["outliers"] < 0.05
    assert turned["features"]["model"]["outliers"] > 0.5
    assert "12 + 20" in cdc_plugin.inspect(run, features=files[0])["error"]
    assert "rows" in cdc_plugin.inspect(features=[rows, rows[1:]])["error"]


def test_pictures_beside_features_are_no_reason_to_look_for_a_backbone(archive, tmp_path):
    np.save(tmp_path / "beside.npy", np.random.default_rng(0).normal(size=(len(np.load(archive)["x"]), 8)))
    succeed("refine", "--features", tmp_path / "beside.npy", "--data", archive, "--clusters", 4, "--dry-run")


def test_new_features_are_predicted_and_others_refused(run, files, tmp_path):
    words = ["--model", run, "--out", tmp_path / "new.csv"]
    succeed("predict", *words, "--features", *files)
    before, after = read_table(run / "predictions.csv"), read_table(tmp_path / "new.csv")
    assert [row["cluster"] for row in before] == [row["cluster"] for row in after]
    assert after[3]["path"] == "text 3"
    assert "12 + 20" in refuse("predict", *words, "--overwrite", "--features", files[0])
    assert "--features" in refuse("predict", *words, "--overwrite", "--data", "digits")
    succeed("predict", "--model", run, "--out", tmp_path / "check", "--features", *files, "--audit", 10)
    assert "text " in (tmp_path / "check" / "audit.html").read_text()


def test_a_model_of_features_is_evaluated_and_predicts_in_python(run, files, tmp_path):
    report = cdc_plugin.evaluate(run, out=tmp_path / "known")
    assert report.metrics["after"]["calibration_head"]["ACC"] > 0.95
    rows = np.concatenate([np.load(files[0])["features"], np.load(files[1])], axis=1)
    outside = [[rows[:, :12] * -1, rows[:, 12:] * -1]]
    scores = cdc_plugin.evaluate(run, features=list(files), ood=outside, out=tmp_path / "ood").metrics["outside"]
    assert scores[0]["scores"]["distance"]["AUROC"] > 0.9
    model = cdc_plugin.load_model(run)
    predicted = model.predict_proba([rows[:, :12], rows[:, 12:]])
    assert predicted.argmax(axis=1).tolist() == report.predictions["cluster"].tolist()
    with pytest.raises(DataError, match="features"):
        cdc_plugin.evaluate(run, data="digits", out=tmp_path / "wrong")


def test_methods_are_compared_on_features(files, tmp_path):
    words = ["--features", *files, "--clusters", 4, "--methods", "kmeans,cdc,scan2,linear", "--seeds", 1, "--epochs", 2]
    done = succeed("compare", *words, "--jobs", 1, "--out", tmp_path / "grid", "--quiet")
    assert all(name in done.stdout for name in ("k-means", "CDC", "SCAN", "linear"))
    assert "failed" not in done.stdout


def test_the_head_is_exported_from_features_to_probabilities(run, files, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    cdc_plugin.export_model(run, "onnx", tmp_path / "head.onnx")
    rows = np.concatenate([np.load(files[0])["features"], np.load(files[1])], axis=1).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    probabilities = session.run(["probabilities"], {"vectors": rows})[0]
    np.testing.assert_allclose(
        probabilities, cdc_plugin.load_model(run).predict_proba([rows[:, :12], rows[:, 12:]]), atol=1e-4
    )


def test_a_stopped_run_on_an_array_resumes_with_the_same_array_only(tmp_path):
    rows = np.eye(4, 12, dtype=np.float32)[CLASSES] + 0.2 * np.random.default_rng(0).normal(size=(200, 12))
    settings = {"clusters": 4, "epochs": 3, "device": "cpu"}
    whole = cdc_plugin.refine(features=rows, out=tmp_path / "whole", **settings)
    again = cdc_plugin.refine(features=rows, out=tmp_path / "whole", resume=True, **settings)
    np.testing.assert_array_equal(whole.predictions["confidence"], again.predictions["confidence"])
    with pytest.raises(DataError, match="not those"):
        cdc_plugin.refine(features=rows + 1, out=tmp_path / "whole", resume=True, **settings)
