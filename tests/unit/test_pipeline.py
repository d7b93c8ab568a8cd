import json
import logging
import os
import re
import shutil
from functools import partial, partialmethod
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import Dataset

import cdc_plugin
from cdc_plugin import Backbone, Report, UserError, inspect, load_model, refine
from cdc_plugin.checkpoints import load_checkpoint
from cdc_plugin.core.cluster_count import Count
from cdc_plugin.errors import ConfigError, DataError, OutputError
from cdc_plugin.pipeline import run
from cdc_plugin.training.request import configure
from cdc_plugin.training.run_folder import RESULT_FILES, leave_nothing_behind, prepare_folder
from tests.helpers.json_records import check_record

QUICK = {"epochs": 1, "hidden": 16, "batch_size": 60, "sub_batch_size": 30, "mini_clusters": 12, "device": "cpu"}
LABEL_FREE = {"expected_accuracy", "heads_agree", "trusted_share", "empty_clusters", "largest_cluster_share"}
LABEL_FREE |= {"clustering_confidence", "augmentation_agreement", "neighbour_consistency", "kmeans_agreement"}
LABEL_FREE |= {"start_agreement", "stability", "balance", "warnings", "expected_low", "expected_high", "signals"}


class Digits(Dataset):
    def __init__(self, pixels: np.ndarray, labels: np.ndarray) -> None:
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.pixels[index]).permute(2, 0, 1), int(self.labels[index])


def read_weights(folder):
    return (folder / "model.safetensors").read_bytes()


def refine_until_stopped(call, *arguments, **settings):
    """End a run in the n-th `write_history`: the state is on disk, nothing after it."""
    stop = Mock(side_effect=[*[None] * (call - 1), KeyboardInterrupt])
    with patch("cdc_plugin.training.run_folder.write_history", stop), pytest.raises(KeyboardInterrupt):
        refine(*arguments, **settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, digits, tiny_checkpoint):
    """One run of two epochs on an array, by checkpoint."""
    out = tmp_path_factory.mktemp("pipeline") / "run"
    settings = {**QUICK, "epochs": 2}
    return refine(tiny_checkpoint, digits[0][:60], clusters=3, out=out, **settings), settings


def test_the_public_names_are_there():
    for name in cdc_plugin.__all__:
        assert getattr(cdc_plugin, name) is not None
    assert set(cdc_plugin.__all__) <= set(dir(cdc_plugin))
    with pytest.raises(AttributeError, match="no attribute 'refin'"):
        _ = cdc_plugin.refin
    assert cdc_plugin.compare_models is cdc_plugin.compare
    for kind in ("ConfigError", "CheckpointError", "DataError", "OutputError"):
        assert kind in cdc_plugin.__all__
        assert issubclass(getattr(cdc_plugin, kind), cdc_plugin.UserError)


def test_a_run_writes_its_files_and_the_report_it_returns(finished):
    report, _ = finished
    assert isinstance(report, Report)
    assert {path.name for path in report.folder.iterdir()} == set(RESULT_FILES) - {"trackers.json", "start.pt"}
    lines = (report.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]
    stored = json.loads((report.folder / "report.json").read_text(encoding="utf-8"))
    assert stored == report.metrics
    check_record(stored, "refinement")
    assert set(stored["label_free"]) == LABEL_FREE
    for part in ("before", "after"):
        assert set(stored[part]) == {"kmeans", "clustering_head", "calibration_head"}
        assert all(sum(figures["cluster_sizes"]) == 60 for figures in stored[part].values())
    assert (stored["images"], stored["clusters"], stored["labels"], stored["skipped"]) == (60, 3, False, [])


def test_predictions_agree_with_the_model_and_the_config_leaves_no_number_open(finished, digits):
    report, settings = finished
    probs = load_model(report.folder).predict_proba(digits[0][:60])
    assert report.predictions["cluster"].tolist() == probs.argmax(axis=1).tolist()
    np.testing.assert_allclose(report.predictions["confidence"], probs.max(axis=1), atol=1e-5)
    stored = yaml.safe_load((report.folder / "config.yaml").read_text(encoding="utf-8"))
    open_settings = {name for name, value in stored.items() if value is None}
    assert open_settings <= {
        "format",
        "arch",
        "branch",
        "head",
        "pool",
        "features",
        "data_root",
        "train_blocks",
        "clusters_between",
    }
    assert {name: stored[name] for name in settings} == settings
    assert None not in (stored["augment"]["flip"], stored["augment"]["crop_scale"])


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(finished, tmp_path, digits, tiny_checkpoint):
    report, settings = finished
    torch.manual_seed(77)  # nothing may depend on the global seed
    for seed, equal in ((0, True), (1, False)):
        out = tmp_path / str(seed)
        refine(tiny_checkpoint, digits[0][:60], clusters=3, out=out, seed=seed, **settings)
        assert (read_weights(out) == read_weights(report.folder)) is equal


def test_labels_change_nothing_but_the_report(finished, tmp_path, digits, tiny_checkpoint):
    report, settings = finished
    for name, labels in (("right", digits[1]), ("wrong", digits[1][::-1].copy())):
        np.savez(tmp_path / f"{name}.npz", x=digits[0][:60], y=labels[:60])
        labelled = refine(tiny_checkpoint, tmp_path / f"{name}.npz", clusters=3, out=tmp_path / name, **settings)
        assert read_weights(tmp_path / name) == read_weights(report.folder)
        assert labelled.metrics["labels"] is True
        assert set(labelled.metrics["after"]["calibration_head"]) >= {"ACC", "NMI", "ARI", "ECE", "CONF"}
    ignored = refine(tiny_checkpoint, tmp_path / "right.npz", 3, out=tmp_path / "none", labels=False, **settings)
    assert ignored.metrics["labels"] is False


def test_a_run_stopped_after_its_first_state_resumes_to_the_same_bytes(finished, tmp_path, digits, tiny_checkpoint):
    report, settings = finished
    arguments = {"clusters": 3, "out": tmp_path / "run", **settings}
    refine_until_stopped(1, tiny_checkpoint, digits[0][:60], **arguments)
    with pytest.raises(OutputError, match="resume=True"):
        refine(tiny_checkpoint, digits[0][:60], **arguments)
    resumed = refine(tiny_checkpoint, digits[0][:60], resume=True, **arguments)
    assert read_weights(resumed.folder) == read_weights(report.folder)
    for part in ("before", "after", "label_free"):
        assert resumed.metrics[part] == report.metrics[part]


def test_a_finished_run_resumes_to_the_same_and_only_with_its_settings_and_images(
    finished, tmp_path, digits, tiny_checkpoint
):
    report, settings = finished
    copy = tmp_path / "copy"
    shutil.copytree(report.folder, copy)
    resumed = refine(tiny_checkpoint, digits[0][:60], clusters=3, out=copy, resume=True, **settings)
    assert read_weights(copy) == read_weights(report.folder)
    assert resumed.metrics["after"] == report.metrics["after"]
    with pytest.raises(ConfigError, match=r"epochs=2.*epochs=5"):
        refine(tiny_checkpoint, digits[0][:60], 3, out=copy, resume=True, **{**settings, "epochs": 5})
    with pytest.raises(DataError, match="not those"):
        refine(tiny_checkpoint, digits[0][1:61], 3, out=copy, resume=True, **settings)


def test_the_same_call_resumes_though_sizes_were_cut_and_numbers_rounded(tmp_path, digits, tiny_checkpoint):
    settings = {**QUICK, "batch_size": 1000, "sub_batch_size": 500}
    arguments = {**settings, "mean": [0.4914, 0.4822, 0.4465], "std": [0.2023, 0.1994, 0.201], "out": tmp_path / "r"}
    first = refine(tiny_checkpoint, digits[0][:30], 2, **arguments)
    again = refine(tiny_checkpoint, digits[0][:30], 2, resume=True, **arguments)
    assert again.metrics["after"] == first.metrics["after"]


def test_a_folder_of_images_in_class_folders_gives_paths_and_figures(tmp_path, digits, tiny_checkpoint, write_images):
    folder = write_images(tmp_path / "images", digits[0][:40], digits[1][:40] % 2)
    report = refine(str(tiny_checkpoint), folder, clusters=2, out=tmp_path / "out", **QUICK)
    assert report.metrics["labels"] is True
    assert report.predictions["path"][0].startswith("class ")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_module_of_ones_own_without_batchnorm(tmp_path, digits, frozen):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 6, 5, 4), nn.GELU(), nn.AdaptiveAvgPool2d(1))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    backbone = Backbone(module, 6, [0.3] * 3, [0.3] * 3, 32)
    report = refine(backbone, digits[0][:40], 2, out=tmp_path / "out", freeze_backbone=frozen, **QUICK)
    assert len(report.predictions) == 40
    refined = load_model(report.folder, module=module)
    moved = any(not torch.equal(o, n) for o, n in zip(before, refined.backbone.module.parameters(), strict=True))
    assert moved is not frozen
    with pytest.raises(UserError, match="module=network"):
        load_model(report.folder)


def test_last_blocks_are_trained_alone_and_a_resumed_run_ends_alike(tmp_path, digits, tiny_checkpoint):
    settings = {**QUICK, "epochs": 3, "train_blocks": 1}
    report = refine(tiny_checkpoint, digits[0][:60], 2, out=tmp_path / "whole", **settings)
    start = load_checkpoint(tiny_checkpoint).backbone.module.state_dict()
    end = load_model(report.folder).backbone.module.state_dict()
    moved = {key.split(".")[0] for key, value in start.items() if not torch.equal(value, end[key])}
    assert moved == {"layer4"}
    refine_until_stopped(2, tiny_checkpoint, digits[0][:60], 2, out=tmp_path / "parts", **settings)
    refine(tiny_checkpoint, digits[0][:60], 2, out=tmp_path / "parts", resume=True, **settings)
    assert read_weights(tmp_path / "parts") == read_weights(report.folder)
    with pytest.raises(ConfigError, match="train_blocks is at most"):
        refine(tiny_checkpoint, digits[0][:60], 2, out=tmp_path / "more", **{**settings, "train_blocks": 99})
    with pytest.raises(ConfigError, match="recompute_blocks"):
        refine(tiny_checkpoint, digits[0][:60], 2, out=tmp_path / "more", **QUICK, recompute_blocks=True)


def test_a_torch_data_set_with_labels_and_zero_epochs_and_the_module_of_the_caller_is_left_alone(
    tmp_path, digits, tiny_backbone
):
    before = {name: tensor.clone() for name, tensor in tiny_backbone.state_dict().items()}
    report = refine(tiny_backbone, Digits(digits[0][:40], digits[1][:40]), 2, out=tmp_path / "out", **QUICK)
    assert report.metrics["data"] == "Digits"
    assert report.metrics["labels"] is True
    assert report.predictions.dtype.names[0] == "index"
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_backbone.state_dict().items())
    untrained = {**QUICK, "epochs": 0}
    report = refine(tiny_backbone, digits[0][:40], 2, out=tmp_path / "none", level="learned", **untrained)
    assert report.metrics["after"]["calibration_head"] == report.metrics["before"]["calibration_head"]


def test_the_confidence_is_set_to_the_estimate_and_no_image_changes_its_cluster(
    tmp_path, digits, tiny_backbone, monkeypatch
):
    def run(level: str) -> Report:
        return refine(tiny_backbone, digits[0][:60], 3, out=tmp_path / level, level=level, overwrite=True, **QUICK)

    learned, short = run("learned"), run("estimated")
    assert np.array_equal(learned.predictions["confidence"], short.predictions["confidence"])  # less than a round
    monkeypatch.setattr("cdc_plugin.training.review.round_epochs", lambda count: 1)
    estimated = run("estimated")
    assert np.array_equal(learned.predictions["cluster"], estimated.predictions["cluster"])
    card = estimated.metrics["label_free"]
    assert card["signals"] == learned.metrics["label_free"]["signals"]
    assert learned.metrics["label_free"]["expected_low"] is None
    assert card["expected_low"] < estimated.predictions["confidence"].mean() < card["expected_high"]
    assert abs(card["signals"]["confidence"] - learned.predictions["confidence"].mean()) < 1e-4


def test_a_frozen_backbone_keeps_its_weights_and_resumes_to_the_same_bytes(tmp_path, digits, tiny_backbone):
    before = {name: tensor.clone() for name, tensor in tiny_backbone.module.state_dict().items()}
    settings = {**QUICK, "epochs": 2, "frozen_views": 2, "freeze_backbone": True}
    refine(tiny_backbone, digits[0][:40], 2, out=tmp_path / "a", **settings)
    loaded = load_model(tmp_path / "a").backbone.module.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in before.items())
    refine_until_stopped(2, tiny_backbone, digits[0][:40], 2, out=tmp_path / "b", **settings)
    refine(tiny_backbone, digits[0][:40], 2, out=tmp_path / "b", resume=True, **settings)
    assert read_weights(tmp_path / "b") == read_weights(tmp_path / "a")


def test_identical_images_end_with_a_warning_in_the_log_and_no_nan(tmp_path, tiny_backbone):
    pixels = np.full((30, 32, 32, 3), 90, dtype=np.uint8)
    report = refine(tiny_backbone, pixels, 2, out=tmp_path / "out", **QUICK)
    assert "collapsed" in (tmp_path / "out" / "train.log").read_text()
    assert np.isfinite(report.predictions["confidence"]).all()


def test_a_bare_module_and_features_that_are_not_finite_are_refused(tmp_path, digits):
    module = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.AdaptiveAvgPool2d(1))
    nn.init.constant_(module[0].weight, float("nan"))
    backbone = Backbone(module, 4, [0.5] * 3, [0.5] * 3, 32)
    for given, message in ((module, r"cdc_plugin\.Backbone\(module, feature_dim"), (backbone, "not finite")):
        with pytest.raises(UserError, match=message):
            refine(given, digits[0][:40], 2, out=tmp_path / "out", **QUICK)


@pytest.mark.parametrize(
    ("count", "changes", "message"),
    [
        (200, {"clusters": None}, "missing clusters=10"),
        (200, {"epoch": 3}, "did you mean epochs"),
        (3, {}, "3 readable images, too few for 2 clusters"),
    ],
)
def test_a_request_that_cannot_be_run_or_resumed_leaves_no_folder(
    tmp_path, digits, tiny_backbone, count, changes, message
):
    with pytest.raises(UserError, match=message):
        refine(tiny_backbone, digits[0][:count], **{"clusters": 2, "out": tmp_path / "out", **QUICK, **changes})
    assert not (tmp_path / "out" / "config.yaml").exists()
    with pytest.raises(ConfigError, match=r"missing backbone=.*data="):
        run(configure(flags={"out": tmp_path / "empty"}), resume=True)


@pytest.mark.parametrize("passes", ["fast", "full"])
@pytest.mark.parametrize("frozen", [False, True])
def test_half_precision_trains_about_as_full_precision_does(tmp_path, tiny_checkpoint, digits, passes, frozen):
    settings = {**QUICK, "freeze_backbone": frozen, "passes": passes, "lr_heads": 1e-4, "lr_backbone": 5e-5}
    whole, half = (
        refine(tiny_checkpoint, digits[0][:60], 3, out=tmp_path / name, precision=name, **settings)
        for name in ("float32", "bfloat16")
    )
    # Rounding moves single images of a network with random weights to other clusters.
    assert half.predictions["confidence"].mean() == pytest.approx(whole.predictions["confidence"].mean(), abs=0.1)


def test_a_compiled_backbone_gives_the_same_clusters(tiny_checkpoint, digits, tmp_path, monkeypatch):
    # Traced as by default, but without minutes of C++ compilation.
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    settings = {**QUICK, "lr_heads": 1e-4, "lr_backbone": 5e-5}
    plain, compiled = (
        refine(tiny_checkpoint, digits[0][:60], 3, out=tmp_path / str(wish), compile=wish, **settings)
        for wish in (False, True)
    )
    np.testing.assert_allclose(compiled.predictions["confidence"], plain.predictions["confidence"], atol=1e-3)
    assert load_model(compiled.folder).predict_proba(digits[0][:3]).shape == (3, 3)


MODES = [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu"), partial(torch.device, "meta")]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_the_same_and_leaves_all_as_it_was_whatever_the_caller_has_switched_off(
    finished, tmp_path, digits, tiny_checkpoint, mode
):
    report, settings = finished
    log, state = logging.getLogger("cdc_plugin"), torch.get_rng_state()
    before = (log.level, list(log.handlers), torch.get_num_threads())
    torch.set_default_dtype(torch.float64)
    try:
        with mode():
            again = refine(tiny_checkpoint, digits[0][:60], clusters=3, out=tmp_path / "run", **settings)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (again.predictions == report.predictions).all()
    assert (log.level, list(log.handlers), torch.get_num_threads()) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", MODES)
def test_models_load_and_predict_the_same_whatever_the_caller_has_switched_off(finished, digits, mode):
    folder = finished[0].folder
    expected = load_model(folder).predict_proba(digits[0][:5])
    torch.set_default_dtype(torch.float64)
    try:
        with mode():
            np.testing.assert_array_equal(load_model(folder).predict_proba(digits[0][:5]), expected)
            assert inspect(folder, digits[0][:20], device="cpu")["loadable"]
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_folder_in_the_way_of_a_result_costs_nothing(finished, tmp_path, digits, tiny_checkpoint):
    shutil.copytree(finished[0].folder, tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    (tmp_path / "run" / "report.html").mkdir()
    before = sorted(os.listdir(tmp_path / "run"))
    with pytest.raises(OutputError, match="is a folder"):
        refine(tiny_checkpoint, digits[0][:60], clusters=3, out=tmp_path / "run", overwrite=True)
    assert sorted(os.listdir(tmp_path / "run")) == before


def test_two_threads_cannot_write_to_one_folder(tmp_path):
    folder = prepare_folder(str(tmp_path / "run"), "run", resume=False, overwrite=False)
    with pytest.raises(OutputError, match="another run is writing"):
        prepare_folder(str(tmp_path / "run"), "run", resume=False, overwrite=True)
    leave_nothing_behind(folder)


@pytest.mark.parametrize("content", [{}, [], 5, {"refiner": {}, "backbone": {}}])
def test_a_state_that_is_none_is_refused_in_words(finished, tmp_path, content):
    shutil.copytree(finished[0].folder, tmp_path / "run")
    torch.save(content, tmp_path / "run" / "last.pt")
    with pytest.raises(OutputError, match="not the state of a run"):
        run(configure(None, {"out": tmp_path / "run", "device": "cpu"}), resume=True)


@pytest.mark.parametrize("damage", ["clusters", "head", "before", "width", "hidden"])
def test_a_state_that_does_not_fit_its_run_is_refused_in_words(finished, tmp_path, digits, damage):
    folder = shutil.copytree(finished[0].folder, tmp_path / "run")
    state = torch.load(folder / "last.pt", weights_only=True)
    if damage == "clusters":
        text = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(re.sub(r"(?m)^clusters: \d+", "clusters: 7", text))
    elif damage == "head":
        state["refiner"] = {}
    elif damage == "before":
        state["before"] = 3
    elif damage == "width":  # of a terabyte
        state["backbone"]["spec"]["widths"] = [60_000] * 4
    else:
        state["heads"]["hidden"] = 10**10
    torch.save(state, folder / "last.pt")
    words = "lacks weights" if damage in ("width", "hidden") else r"config\.yaml|last\.pt"
    with pytest.raises(OutputError, match=words):
        run(configure(None, {"out": folder, "device": "cpu"}), data=digits[0][:60], resume=True)


@pytest.fixture
def numbers(monkeypatch):
    """Let a run find 2 clusters at its start and 3 after training, and small runs be looked at again."""
    found = {2: Count(2, 2, 4, [2, 3, 4], [0.8, 0.1, 0.1], [2]), 3: Count(3, 2, 3, [2, 3, 4], [0.2, 0.7, 0.1], [3])}
    monkeypatch.setattr("cdc_plugin.training.prepare.find_number", lambda *arguments: found[2])
    monkeypatch.setattr("cdc_plugin.training.review.find_number", lambda *arguments: found[3])
    monkeypatch.setattr("cdc_plugin.training.review.LEAST_IMAGES", 0)
    monkeypatch.setattr("cdc_plugin.training.review.UNREADABLE", 0.0)
    monkeypatch.setattr("cdc_plugin.training.review.round_epochs", lambda count: 1)


def test_a_run_whose_features_speak_for_another_number_begins_again_with_it(numbers, tmp_path, digits, tiny_checkpoint):
    found = refine(tiny_checkpoint, digits[0][:60], clusters="auto:2-4", out=tmp_path / "auto", **QUICK)
    check_record(found.metrics, "refinement")
    assert found.metrics["count"]["tried"] == [2, 3]
    assert (found.metrics["clusters"], load_model(tmp_path / "auto").clusters) == (3, 3)
    assert yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())["clusters"] == 3
    again = refine(tiny_checkpoint, digits[0][:60], clusters="auto:2-4", out=tmp_path / "auto", resume=True, **QUICK)
    assert (again.metrics["count"], again.metrics["after"]) == (found.metrics["count"], found.metrics["after"])


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_search_that_is_stopped_anywhere_ends_alike(call, numbers, tmp_path, digits, tiny_checkpoint):
    whole = refine(tiny_checkpoint, digits[0][:60], clusters="auto:2-4", out=tmp_path / "whole", **QUICK)
    refine_until_stopped(call, tiny_checkpoint, digits[0][:60], clusters="auto:2-4", out=tmp_path / "part", **QUICK)
    resumed = refine(tiny_checkpoint, digits[0][:60], out=tmp_path / "part", clusters="auto:2-4", resume=True, **QUICK)
    assert read_weights(resumed.folder) == read_weights(whole.folder)
    assert resumed.metrics["count"] == whole.metrics["count"]


def test_a_number_that_is_stated_is_not_looked_for(numbers, tmp_path, digits, tiny_checkpoint):
    report = refine(tiny_checkpoint, digits[0][:60], clusters=2, out=tmp_path / "run", **QUICK)
    assert (report.metrics["count"], report.metrics["clusters"]) == (None, 2)


def test_the_number_is_found_from_features_alone(tmp_path):
    randomness = np.random.default_rng(0)
    rows = np.eye(4, 16).repeat(50, axis=0) * 6 + randomness.normal(size=(200, 16))
    settings = {**QUICK, "out": tmp_path / "run"}
    report = refine(features=rows.astype(np.float32), clusters="auto", **settings)
    assert report.metrics["clusters"] == report.metrics["count"]["number"] == 4
    changes = report.metrics["next_changes"]
    assert len(changes["merge"]["clusters"]) == 2
    assert all(0 <= row < 200 for side in changes["merge"]["examples"] for row in side)
