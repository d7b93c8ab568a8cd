import json
import re
import socket
from pathlib import Path

import huggingface_hub.hub_mixin
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load
from safetensors.torch import load_file, save_file
from torch import nn

from cdc_plugin.checkpoints import load_checkpoint
from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.core.hierarchy import Hierarchy
from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.errors import UserError
from cdc_plugin.integrations.hub.model import CalibratedClusterer, render_card
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead, CosineHead

FILES = ["README.md", "config.json", "model.safetensors"]
PROVENANCE = {"tool": "cdc_plugin", "backbone": "/home/me/secret/net.pth", "data": "/home/me/photos", "epochs": 3}
IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(tiny_backbone):
    """A model with two unlike heads and prototypes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = [ClusterHead(8, 6, 4), ClusterHead(8, 6, 4)]
    features = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    prototypes = fit_prototypes(features, torch.arange(60) % 4, 4)
    return Clusterer(tiny_backbone, *heads, prototypes).eval()


@pytest.fixture
def folder(model, tmp_path):
    CalibratedClusterer(model, PROVENANCE).save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


@pytest.fixture
def _no_network(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a request leaves the machine")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@torch.no_grad()
def probabilities(module):
    return module(IMAGES)


def test_probabilities_are_those_of_the_calibration_head_on_normalised_images(model):
    with torch.no_grad():
        expected = model((IMAGES - 0.3) / 0.35).softmax(dim=1)
    torch.testing.assert_close(probabilities(CalibratedClusterer(model)), expected)


@pytest.mark.usefixtures("_no_network")
def test_a_folder_gives_the_same_model_back_without_network(model, folder, capsys):
    again = CalibratedClusterer.from_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert torch.equal(probabilities(again), probabilities(CalibratedClusterer(model)))
    assert not any(part.training for part in again.modules())
    features = torch.randn(5, 8)
    for found, wanted in zip(
        (again.clusterer.clustering_head, again.clusterer.prototypes.distance),
        (model.clustering_head, model.prototypes.distance),
        strict=True,
    ):
        assert torch.equal(found(features), wanted(features))
    assert again.clusterer.prototypes.limit == pytest.approx(model.prototypes.limit)
    assert capsys.readouterr().out == ""


def test_paths_pictures_and_arrays_give_what_the_model_itself_gives(model, folder, digits, write_images, tmp_path):
    again, pixels = CalibratedClusterer.from_pretrained(folder), digits[0][:5]
    photos = write_images(tmp_path / "photos", pixels)
    np.testing.assert_array_equal(again.predict_proba(pixels), model.predict_proba(pixels))
    np.testing.assert_allclose(again.predict_proba(str(photos)), model.predict_proba(pixels), atol=1e-6)


@pytest.mark.parametrize("images", [torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(3, 32, 32)])
def test_images_that_would_give_nonsense_are_refused(model, images):
    with pytest.raises(ValueError, match=r"expected float images \(N, 3, S, S\) in \[0, 1\], found torch"):
        CalibratedClusterer(model)(images)


def test_our_own_loaders_read_the_folder(model, folder):
    again = load_model(folder)
    assert torch.equal(again(IMAGES), model(IMAGES))
    assert again.prototypes is not None
    loaded = load_checkpoint(folder)
    assert (loaded.format, len(loaded.heads), loaded.origin.epoch) == ("native", 2, 3)
    assert loaded.origin.why["mean"] == "stated in config.json"


def test_heads_of_other_methods_come_back(model, tmp_path):
    with torch.random.fork_rng():
        model.calibration_head = CosineHead([["linear", 8, 5], ["relu"]], 5, 4, 0.05).eval()
        model.clustering_head = CosineHead([["linear", 8, 5], ["relu"]], 5, 4, 0.05).eval()
    CalibratedClusterer(model).save_pretrained(tmp_path)
    again = CalibratedClusterer.from_pretrained(tmp_path)
    assert torch.equal(probabilities(again), probabilities(CalibratedClusterer(model)))


def test_weights_that_are_missing_are_told_not_guessed(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["calibration_head.3.weight"]
    save_file(tensors, folder / "model.safetensors")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "sha256": None}))
    with pytest.raises(UserError, match=r"calibration_head"):
        CalibratedClusterer.from_pretrained(folder)


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"architecture": "resnet18"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"has no model.json") as refusal:
        CalibratedClusterer.from_pretrained(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("_no_network")
def test_a_repository_is_read_from_the_cache_by_its_name(model, folder, tmp_path):
    home = tmp_path / "cache" / "models--me--clusters"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    (home / "snapshots").mkdir()
    folder.rename(home / "snapshots" / ("0" * 40))
    again = CalibratedClusterer.from_pretrained("me/clusters", cache_dir=tmp_path / "cache", local_files_only=True)
    assert torch.equal(probabilities(again), probabilities(CalibratedClusterer(model)))
    assert again.card.startswith("---\n")


def test_what_is_pushed_keeps_its_card_and_takes_a_licence(folder, monkeypatch):
    pushed = {}

    class Api:
        def __init__(self, **options): ...

        def create_repo(self, repo_id, **options):
            return type("Repository", (), {"repo_id": repo_id})

        def upload_folder(self, folder_path, **options):
            pushed.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
            return "address"

    monkeypatch.setattr(huggingface_hub.hub_mixin, "HfApi", Api)
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMy own words.\n")
    model = CalibratedClusterer.from_pretrained(folder)
    assert model.push_to_hub("me/clusters", model_card_kwargs={"license": "mit"}) == "address"
    assert sorted(pushed) == FILES
    card = ModelCard(pushed["README.md"].decode())
    assert (card.data.license, card.data.library_name) == ("mit", "cdc-plugin")
    assert card.text.endswith("My own words.\n")
    assert pushed["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert pushed["config.json"] == (folder / "config.json").read_bytes()


def test_folders_of_paths_are_not_published(folder):
    texts = [(folder / name).read_text() for name in ("config.json", "README.md")]
    assert all("net.pth" in text and "photos" in text for text in texts)
    assert not any("/home" in text or "secret" in text for text in texts)


def test_a_network_of_the_users_own_class_is_refused(model, tmp_path):
    model.backbone = Backbone(nn.Flatten(), 3 * 32 * 32, [0.5] * 3, [0.5] * 3, 32)
    with pytest.raises(UserError, match=r"own class, which no file can rebuild.*onnx"):
        CalibratedClusterer(model).save_pretrained(tmp_path)


def test_a_result_folder_is_not_written_to(model, tmp_path):
    model.save(tmp_path, {})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"holds another model \(model.json\)"):
        CalibratedClusterer(model).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


DESCRIPTION = {
    "backbone": {"spec": {"family": "timm", "name": "vit"}, "mean": [0.5] * 3, "std": [0.5] * 3, "input_size": 32},
    "heads": {"clusters": 4},
    "provenance": {"backbone": "timm:vit", "seed": 1},
}
FIGURES = {"ACC": 0.9, "NMI": 0.8, "ARI": 0.75, "ECE": 0.0123, "AUROC": None, "CONF": 0.91}
REPORT = {
    "data": "photos",
    "images": 500,
    "labels": True,
    "after": {"calibration_head": FIGURES, "clustering_head": {**FIGURES, "ECE": 0.2}, "kmeans": {"ACC": 0.7}},
    "label_free": {"expected_accuracy": 0.91, "stability": None, "warnings": [{"kind": "size", "text": "one | two"}]},
}


def test_metadata_are_what_the_hub_reads(tmp_path):
    (tmp_path / "README.md").write_text(render_card(DESCRIPTION, REPORT), encoding="utf-8")
    found = metadata_load(tmp_path / "README.md")
    assert found["library_name"] == "cdc-plugin"
    assert found["pipeline_tag"] == "image-classification"
    assert "deep-clustering" in found["tags"]
    assert "license" not in found  # the user's to choose
    card = ModelCard.load(tmp_path / "README.md", ignore_metadata_errors=False)
    assert card.data.to_dict() == found
    assert card.text.lstrip().startswith("# photos in 4 clusters")


def test_measured_and_label_free_figures_are_kept_apart():
    card = render_card(DESCRIPTION, REPORT)
    free, measured = card.split("## Figures without labels")[1].split("## Licence")[0].split("## Figures with labels")
    assert "| mean calibrated confidence, the expected accuracy | 91.0 |" in free
    assert "Warning: one \\| two" in free
    assert "stability" not in free
    assert "90.0" not in free
    assert "| calibration head (it predicts) | 90.0 | 80.0 | 75.0 | 1.2 |" in measured
    assert "| k-means on the features | 70.0 | - | - | - |" in measured
    assert "AUROC" not in measured


def test_without_labels_no_accuracy_is_claimed_and_without_a_report_the_card_says_less():
    unlabelled = {"labels": False, "after": {head: {"CONF": 0.91} for head in REPORT["after"]}}
    card = render_card(DESCRIPTION, {**REPORT, **unlabelled})
    assert "have not been measured" in card
    assert "91.0" in card
    assert "| calibration head" not in card
    card = render_card(DESCRIPTION, {})
    assert "# Images in 4 clusters" in card
    assert "None were recorded." in card
    assert "| backbone | timm:vit |" in card


@pytest.mark.parametrize("name", ["a|b\nc", "---", "{clusters}", "<img src=x>", "\udcff.npz", "漢字 photos"])
def test_no_name_of_a_file_breaks_the_card(name, tmp_path):
    card = render_card(DESCRIPTION, {**REPORT, "data": name})
    (tmp_path / "README.md").write_text(card, encoding="utf-8")
    assert metadata_load(tmp_path / "README.md")["library_name"] == "cdc-plugin"
    (row,) = [line for line in card.splitlines() if line.startswith("| data |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3
    assert "<img" not in card


@pytest.mark.usefixtures("_no_network")
def test_the_code_on_the_card_runs_in_its_folder(folder, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    names = {}
    exec(code, names)
    assert names["probabilities"].shape == (2, 4)
    np.testing.assert_allclose(names["probabilities"].sum(axis=1), 1, atol=1e-6)
    assert json.loads((folder / "config.json").read_text())["heads"]["clusters"] == 4


def test_levels_go_to_the_hub_and_back(model, tmp_path, digits):
    model.hierarchy = Hierarchy(((1, 2), (0, 1), (0, 3)), (0.1, 0.2, 0.3))
    CalibratedClusterer(model, PROVENANCE).save_pretrained(tmp_path / "levels")
    again = CalibratedClusterer.from_pretrained(tmp_path / "levels")
    found = again.predict_proba(digits[0][:5], level=2)
    np.testing.assert_allclose(found, model.predict_proba(digits[0][:5], level=2), atol=1e-6)
    assert found.shape == (5, 2)
