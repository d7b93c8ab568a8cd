"""The folder for the Hugging Face hub: written by the command, read back by its class and by our own commands."""

import json

import pytest
import torch

from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.cli.refine import refine_command
from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.errors import UserError
from cdc_plugin.integrations.export import export_model
from cdc_plugin.models.backbone import Backbone
from tests.helpers.commands import names_in, run_python
from tests.helpers.exported_models import MEAN, STD, TINY_RESNET, OwnNetwork, clusterer, result_folder

FILES = ["README.md", "config.json", "model.safetensors"]
EXPORT = "from cdc_plugin.cli.export import export_command; export_command()"
# Fails on any attempt to reach another machine.
OFFLINE = """
import socket
def refuse(*arguments, **options): raise AssertionError("a request leaves the machine")
socket.socket.connect = socket.getaddrinfo = refuse
"""
REPORT = {
    "data": "/home/me/photos",
    "images": 12,
    "labels": True,
    "after": {"calibration_head": {"ACC": 0.75, "NMI": 0.5, "ARI": 0.25, "ECE": 0.125}},
    "label_free": {"expected_accuracy": 0.875},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A result folder with prototypes and a report."""
    folder = tmp_path_factory.mktemp("run") / "photos"
    folder.mkdir()
    model = clusterer(TINY_RESNET)
    features = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    model.prototypes = fit_prototypes(features, torch.arange(40) % 4, 4)
    model.save(folder, {"tool": "cdc_plugin", "data": "/home/me/photos", "epochs": 3})
    (folder / "report.json").write_text(json.dumps(REPORT))
    return folder


@pytest.fixture(scope="module")
def exported(run):
    export_model(run, "hub", run.parent / "hub")
    return run.parent / "hub"


def test_the_command_writes_model_and_card_without_network(run, tmp_path):
    words = ["--model", run, "--to", "hub", "--out", "my hub"]
    done = run_python("-c", OFFLINE + EXPORT, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert names_in(tmp_path / "my hub") == {*FILES}
    assert 'model = CalibratedClusterer.from_pretrained("my hub")' in done.stdout
    assert done.stderr.startswith("note: my hub/README.md states no licence")
    assert len(done.stderr.splitlines()) == 1
    card = (tmp_path / "my hub" / "README.md").read_text()
    assert "# photos in 4 clusters" in card
    assert "| mean calibrated confidence, the expected accuracy | 87.5 |" in card
    assert "| calibration head (it predicts) | 75.0 | 50.0 | 25.0 | 12.5 |" in card
    assert "/home" not in card


def test_our_commands_take_the_folder_for_the_model_of_the_run(run, exported, digits, write_images, tmp_path, capsys):
    photos = write_images(tmp_path / "photos", digits[0][:20])
    refine_command(["--backbone", str(exported), "--data", str(photos), "--dry-run", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert "checkpoint: cdc-refine, ResNet" in printed
    assert "init: keep" in printed
    assert "clusters: 4" in printed
    probabilities = load_model(run).predict_proba(str(photos))
    assert (load_model(exported).predict_proba(str(photos)) == probabilities).all()


def test_an_earlier_export_is_replaced_whole_if_asked(run, exported, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in FILES:
        (out / name).write_text("of before")
    (out / "model.json").write_text('{"format": "cdc_plugin", "weights": "model.safetensors"}')  # an export for timm
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty .*overwrite=True"):
        export_model(run, "hub", out)
    export_model(run, "hub", out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == [*FILES[:2], "mine.txt", FILES[2]]
    assert all((out / name).read_bytes() == (exported / name).read_bytes() for name in FILES)


def test_models_in_memory_can_be_exported_but_have_no_figures(tmp_path):
    export_model(clusterer(TINY_RESNET), "hub", tmp_path / "out")
    assert "None were recorded." in (tmp_path / "out" / "README.md").read_text()


def test_what_has_no_calibrated_clusters_is_refused(run, tmp_path):
    network = clusterer(TINY_RESNET)
    network.backbone = Backbone(OwnNetwork(), 8, MEAN, STD, 32)
    plain = result_folder(tmp_path / "run", TINY_RESNET)
    description = json.loads((plain / "model.json").read_text())
    (plain / "model.json").write_text(json.dumps({**description, "heads": None, "sha256": None}))
    for model, reason in (
        (load_model(run).backbone, r"takes a result of cdc-refine"),
        (plain, r"run is not calibrated.*cdc-refine --backbone"),
        (network, r"own class, which no file can rebuild; to='onnx'"),
    ):
        with pytest.raises(UserError, match=reason) as refusal:
            export_model(model, "hub", tmp_path / "out")
        assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()
