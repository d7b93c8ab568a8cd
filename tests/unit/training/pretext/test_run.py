import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cdc_plugin import load_backbone
from cdc_plugin.cli.pretrain import outcome, pretrain_command
from cdc_plugin.config.load import to_yaml
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.images import open_images
from cdc_plugin.errors import UserError
from cdc_plugin.training import run_folder
from cdc_plugin.training.pretext import run as pretraining
from cdc_plugin.training.pretext.config import load_pretrain_config, resolve
from cdc_plugin.training.pretext.run import Pretrained, pretrain, statistics

FILES = {"config.yaml", "last.pt", "metrics.jsonl", "train.log", "model.safetensors", "model.json"}
QUICK = ["batch_size=32", "hidden=16", "projection=8", "input_size=16", "device=cpu"]


@pytest.fixture(scope="module")
def archive(tmp_path_factory, digits) -> Path:
    path = tmp_path_factory.mktemp("archive") / "some digits.npz"
    np.savez(path, x=digits[0][:64], y=digits[1][:64])
    return path


@pytest.fixture(scope="module")
def finished(archive, tmp_path_factory) -> Pretrained:
    out = tmp_path_factory.mktemp("runs") / "moco"
    return pretrain(None, {"data": str(archive), "out": str(out), "epochs": 2, "seed": 3}, QUICK)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_run_writes_exactly_its_files_and_a_backbone_that_states_its_input_and_its_origin(finished, archive):
    assert {path.name for path in finished.folder.iterdir()} == FILES
    config = load_pretrain_config(finished.folder / "config.yaml")
    own = {"out": finished.config.out, "device": finished.config.device}  # which no file decides
    assert vars(config) | own == vars(finished.config)
    assert (config.arch, config.method, config.queue, config.data) == ("small", "mocov2", 32, str(archive))
    lines = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [{"epoch", "loss", "spread", "lr", "seconds"}] * 2
    assert "epoch 2/2" in (finished.folder / "train.log").read_text()
    backbone = load_backbone(finished.folder)
    assert backbone.input_size == 16
    assert backbone.inferred == ()
    assert backbone.mean.tolist() == pytest.approx(finished.config.mean)
    assert backbone(torch.zeros(2, 3, 16, 16)).shape == (2, 128)
    provenance = json.loads((finished.folder / "model.json").read_text())["provenance"]
    assert provenance["tool"] == "cdc-pretrain"
    assert provenance["method"].startswith("MoCo-v2 (lightly ")
    assert (provenance["epochs"], provenance["of_epochs"], provenance["seed"]) == (2, 2, 3)


def test_an_interrupted_run_goes_on_to_the_same_bytes(finished, archive, tmp_path, monkeypatch):
    out = tmp_path / "moco"
    flags = {"data": str(archive), "out": str(out), "epochs": 2, "seed": 3}
    original = run_folder.write_state

    def interrupt(folder: Path, state: dict) -> None:
        original(folder, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(run_folder, "write_state", interrupt)
        pretrain(None, flags, QUICK)
    # What there is can be used, and says how far it got.
    assert load_backbone(out).input_size == 16
    provenance = json.loads((out / "model.json").read_text())["provenance"]
    assert (provenance["epochs"], provenance["of_epochs"]) == (1, 2)
    assert weights(out) != weights(finished.folder)
    with pytest.raises(UserError, match="seed=3, but seed=4"):
        pretrain(None, {**flags, "seed": 4}, QUICK, resume=True)
    again = pretrain(None, {"out": str(out)}, resume=True)  # the folder knows its settings
    assert weights(out) == weights(finished.folder)
    ours, theirs = ([{**line, "seconds": 0} for line in run.history] for run in (again, finished))
    assert ours == theirs


def test_a_recipe_asked_for_is_not_mixed_with_that_for_the_size_of_the_data(archive, tmp_path):
    flags = {"data": str(archive), "out": str(tmp_path / "out"), "epochs": 1, "arch": "small"}
    config = pretrain("paper-byol", flags, QUICK).config
    assert (config.crop_scale, config.output_norm, config.optimizer, config.largest_size) == (0.08, False, "lars", 224)
    assert "laptop" not in (tmp_path / "out" / "train.log").read_text()


def test_only_the_second_views_are_solarised_and_each_has_its_own_share_of_blur():
    words = ["solarize=0.3", "blur=[0.7,0.1]"]
    config = resolve(load_pretrain_config("paper-byol", {"mean": [0.5] * 3, "std": [0.5] * 3}, words), 3000, 96)
    first, second = pretraining.view_settings(config)
    assert ((first.blur, first.solarize), (second.blur, second.solarize)) == ((0.7, 0.0), (0.1, 0.3))
    assert replace(first, blur=0.1, solarize=0.3) == second


def test_labels_make_no_difference(finished, digits, tmp_path):
    np.savez(tmp_path / "some digits.npz", x=digits[0][:64])
    flags = {"data": str(tmp_path / "some digits.npz"), "out": str(tmp_path / "out"), "epochs": 2, "seed": 3}
    assert weights(pretrain(None, flags, QUICK).folder) == weights(finished.folder)


def test_a_folder_that_holds_anything_is_not_touched_unless_asked_nor_a_run_of_another_command(
    finished, archive, tmp_path
):
    before = weights(finished.folder)
    flags = {"data": str(archive), "out": str(finished.folder)}
    with pytest.raises(UserError, match="overwrite=True"):
        pretrain(None, flags, QUICK)
    with pytest.raises(UserError, match="crop_scale"):  # asked to overwrite, but with a mistake in the settings
        pretrain(None, flags, [*QUICK, "crop_scale=2"], overwrite=True)
    assert weights(finished.folder) == before
    (tmp_path / "config.yaml").write_text(to_yaml(RefineConfig(backbone="x.pt")))
    torch.save({"version": 1}, tmp_path / "last.pt")
    with pytest.raises(UserError, match="not a run of cdc-pretrain"):
        pretrain(None, {"out": str(tmp_path)}, resume=True)


def test_mean_and_std_are_those_of_all_pixels_which_must_differ(digits):
    mean, std = statistics(open_images(digits[0][:50], 32))
    shares = digits[0][:50].reshape(-1, 3) / 255
    assert mean == pytest.approx(shares.mean(axis=0), abs=1e-4)
    assert std == pytest.approx(shares.std(axis=0), abs=1e-4)
    with pytest.raises(UserError, match="alike"):
        statistics(open_images(np.full((40, 16, 16, 3), 7, dtype=np.uint8), 16))


def test_photos_are_made_no_larger_than_the_recipe_says(tmp_path, randomness):
    for number in range(32):
        pixels = torch.randint(256, (100, 130, 3), generator=randomness, dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{number}.jpg")
    config = load_pretrain_config("laptop-simsiam", {"data": str(tmp_path)})
    (tmp_path / "out").mkdir()
    started, images = pretraining.start(config, tmp_path / "out")
    assert (started.input_size, images.images.shape) == (64, (32, 64, 64, 3))
    assert started.flip is True


def test_mistakes_end_with_one_line_and_recipes_are_listed(capsys, tmp_path, monkeypatch, archive, refuse):
    monkeypatch.chdir(tmp_path)
    pretrain_command(["--list-recipes"])
    assert capsys.readouterr().out.splitlines()[1].startswith("laptop-byol")
    assert "missing --data" in refuse("pretrain", "--epochs", "2", "--quiet")
    assert "did you mean byol" in refuse("pretrain", "--data", "digits", "--method", "byo", "--quiet")
    assert "nothing at nowhere" in refuse("pretrain", "--data", "nowhere", "--quiet")
    assert "unknown --arch" in refuse(
        "pretrain", "--data", str(archive), "--arch", "resnet19", "--quiet", "--out", "out"
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.log"]


def test_the_outcome_says_what_to_type_next_and_warns_of_a_collapse(finished):
    text = outcome(finished)
    folder, data = finished.folder, finished.config.data
    assert f"next: cdc-refine --backbone {folder} --data '{data}' --clusters C" in text
    assert "warning" not in text
    collapsed = Pretrained(folder, finished.config, [{"loss": -1.0, "spread": 0.01}], finished.network)
    assert "collapsed" in outcome(collapsed)
    assert "lr=0.03" in outcome(collapsed)
