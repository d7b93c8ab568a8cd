import json
import shutil
from pathlib import Path

import pytest
import torch

from cdc_plugin.checkpoints.load import load_backbone
from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.config.load import to_yaml
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.models import EvaluatedModel, distinct_names, open_model
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead


@pytest.fixture
def result(tiny_backbone, tmp_path):
    """A finished run's folder: model, settings and what it wrote on its way."""
    folder = tmp_path / "photos"
    folder.mkdir()
    Clusterer(tiny_backbone, ClusterHead(8, 12, 3), ClusterHead(8, 12, 3)).save(folder, {"data_digest": "abc"})
    (folder / "config.yaml").write_text(to_yaml(RefineConfig(data="d.npz", clusters=3, epochs=9, seed=4)))
    (folder / "metrics.jsonl").write_text('{"epoch": 1}\n{"epoch": 2}\n')
    (folder / "report.json").write_text('{"labels": true, "before": {"kmeans": {}}}')
    (folder / "last.pt").write_bytes(b"a state")
    return folder


@pytest.fixture
def scan(scan_checkpoint, tmp_path):
    return Path(shutil.copy(scan_checkpoint, tmp_path))


@pytest.mark.parametrize("inside", ["", "model.safetensors", "last.pt"])
def test_a_result_is_opened_with_what_its_run_wrote(result, inside):
    subject = open_model(result / inside)
    assert (subject.name, subject.writer, subject.heads, subject.foreign) == ("photos", "cdc-refine", 2, False)
    assert subject.run is not None
    assert (subject.run.digest, subject.run.config.seed, subject.run.config.data) == ("abc", 4, "d.npz")
    assert [line["epoch"] for line in subject.run.history] == [1, 2]
    assert subject.run.report["before"] == {"kmeans": {}}
    assert "seed: 4" in subject.run.settings


def test_what_a_run_wrote_beside_its_model_may_be_damaged_or_absent(result):
    for report, history in (("{", "no JSON"), ("[" * 100_000, "[" * 100_000), ("7", "[1]\n2\n"), (None, None)):
        for name, content in (("report.json", report), ("metrics.jsonl", history)):
            if content is None:  # something that never ends
                (result / name).unlink()
                (result / name).symlink_to("/dev/zero")
            else:
                (result / name).write_text(content)
        run = open_model(result).run
        assert run is not None
        assert (run.report, run.history) == ({}, [])
    if Path("/proc/self/status").exists():  # as /proc/kmsg: a file that states no size, and may never end
        (result / "config.yaml").rename(result / "kept")
        (result / "config.yaml").symlink_to("/proc/self/status")
        assert open_model(result).run is None
        (result / "kept").rename(result / "config.yaml")
    for name in ("config.yaml", "metrics.jsonl", "report.json", "last.pt"):
        (result / name).unlink()
    assert open_model(result).run is None
    model = load_model(result)  # given in Python, it is taken as it is
    subject = open_model(model)
    assert subject.model is model
    assert (subject.path, subject.foreign) == (None, False)


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
def test_a_model_that_changed_since_it_was_written_is_refused(result, name):
    content = bytearray((result / name).read_bytes())
    if name == "model.json":
        content = content.replace(b'"input_size": ', b'"input_size": 1')
    else:
        content[-5] ^= 1
    (result / name).write_bytes(content)
    for read in (open_model, load_model, load_backbone):
        with pytest.raises(UserError, match="has changed since it was written"):
            read(result)
    copy = (result / "model.safetensors").rename(result / "renamed.safetensors")
    with pytest.raises(UserError, match="has changed since it was written"):
        load_backbone(copy)


@pytest.mark.parametrize("change", [{"provenance": {"warnings": 7}}, {"provenance": 3}])
def test_odd_notes_of_a_run_do_not_stop_its_model(result, change):
    described = json.loads((result / "model.json").read_text())
    (result / "model.json").write_text(json.dumps({**described, **change}))
    assert open_model(result).warnings == ()


def test_a_description_beyond_reason_is_refused_in_words(result):
    described = json.loads((result / "model.json").read_text())
    described["backbone"]["input_size"] = 999_999
    for text in (json.dumps(described), "[" * 100_000):
        (result / "model.json").write_text(text)
        with pytest.raises(UserError, match=r"model\.json"):
            open_model(result)


def test_a_checkpoint_of_others_has_one_head_and_keeps_what_was_said_of_it(scan):
    subject = open_model(scan, head=0)
    assert (subject.name, subject.heads, subject.foreign, subject.run) == ("model", 1, True, None)
    assert subject.options == ("--head", "0")
    assert "SCAN" in subject.writer
    assert "stem 3x3" in subject.network
    assert not torch.equal(subject.model.calibration_head[0].weight, open_model(scan).model.calibration_head[0].weight)


@pytest.mark.parametrize("given", ["", "last.pt"])
def test_an_unfinished_run_is_refused_with_how_far_it_is_and_how_to_go_on(result, given):
    (result / "model.json").unlink()
    (result / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"unfinished run \(epoch 2 of 9\).*cdc-refine --resume --out \S*photos$"):
        open_model(result / given)


def test_the_settings_of_somebody_else_are_not_taken_for_an_unfinished_run(scan):
    (scan.parent / "config.yaml").write_text("optimizer: sgd\n")
    assert open_model(scan.parent).writer == "SCAN (clustering)"


def test_a_missing_model_a_backbone_without_clusters_and_a_run_that_could_not_start_are_refused(
    result, tiny_checkpoint
):
    log = result.parent / "failed" / "train.log"
    log.parent.mkdir()
    log.write_text("no images")
    for path, words in (
        (result.parent / "photo", r"there is no model .*photo; .* has photos"),
        (tiny_checkpoint, "no clustering head; refine it first: cdc-refine --backbone"),
        (log.parent, "only the log of a run that could not start"),
    ):
        with pytest.raises(UserError, match=words):
            open_model(path)


def test_models_called_alike_are_told_apart_by_their_folders_or_numbers(scan, tmp_path):
    (tmp_path / "other").mkdir()
    shutil.copy(scan, tmp_path / "other")
    first, second = open_model(scan), open_model(tmp_path / "other" / scan.name)
    assert distinct_names([first]) == ["model"]
    assert distinct_names([first, second]) == [tmp_path.name, "other"]
    assert distinct_names([first, first]) == [tmp_path.name, f"{tmp_path.name}-2"]
    given = EvaluatedModel("model", None, first.model, "the caller")
    assert distinct_names([given, second]) == ["model", "other"]
