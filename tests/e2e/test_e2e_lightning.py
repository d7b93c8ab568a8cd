"""The stage at the end of a training with Lightning."""

import json
import sys
import types

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from cdc_plugin import UserError, load_model
from cdc_plugin.integrations import lightning_callback
from cdc_plugin.integrations.lightning_callback import RefineAtEnd, identify_network, wrap_module


class Callback:
    """What Lightning's base class is to a callback: somebody who has all the other hooks."""


@pytest.fixture
def library(monkeypatch):
    """A Lightning that takes no seconds to import."""
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", types.SimpleNamespace(Callback=Callback))


def pretrained(**parts):
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def small_network():
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))


def squares(count=40):
    """Dark and bright images, so that there is something to find."""
    images = np.random.default_rng(0).integers(0, 60, (count, 8, 8, 3), dtype=np.uint8)
    images[::2] += 180
    return images


def test_the_callback_is_one_of_the_library_in_use_and_without_any_one_line_says_what_to_install(library, monkeypatch):
    callback = RefineAtEnd(squares(), 2, input_size=8)
    assert isinstance(callback, Callback)
    assert isinstance(callback, RefineAtEnd)
    monkeypatch.delitem(sys.modules, "lightning.pytorch")  # now both could be imported, and one of them was
    assert lightning_callback.find_callback_base() is Callback
    for name in lightning_callback.LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pip install lightning"):
        RefineAtEnd(squares(), 2, input_size=8)


def test_the_end_of_fit_gives_clusters_and_leaves_the_module_alone(library, tmp_path):
    module = pretrained(model=pretrained(encoder=small_network()))
    module.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    callback = RefineAtEnd(
        squares(), 2, tmp_path / "out", input_size=8, attribute="model.encoder", epochs=1, hidden=16, seed=3
    )
    callback.on_fit_end(types.SimpleNamespace(is_global_zero=True), module)
    assert callback.report is not None
    assert callback.report.folder == tmp_path / "out"
    assert callback.report.metrics["seed"] == 3
    assert len(callback.report.predictions) == 40
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize("known", [True, False])
def test_a_network_that_its_weights_tell_can_be_built_again_without_the_module(library, tmp_path, known):
    network = torchvision.models.resnet18() if known else small_network()
    if known:
        network = nn.Sequential(*list(network.children())[:-1])  # as lightly's examples cut it
    callback = RefineAtEnd(squares(), 2, tmp_path / "out", input_size=8, epochs=0, hidden=16)
    callback.on_fit_end(types.SimpleNamespace(is_global_zero=True), pretrained(backbone=network))
    described = json.loads((tmp_path / "out" / "model.json").read_text())["backbone"]
    assert (described["spec"] is not None) is known
    if known:
        assert load_model(tmp_path / "out").backbone.feature_dim == 512


def test_a_network_with_familiar_weights_but_other_features_is_kept_and_its_features_are_counted():
    class Doubled(nn.Sequential):
        def forward(self, images):
            return 2 * super().forward(images)

    module = Doubled(*list(torchvision.models.resnet18().children())[:-1])
    backbone = wrap_module(module, 32, None, None)
    assert identify_network(backbone) is backbone
    assert (backbone.feature_dim, backbone.input_size, backbone.inferred) == (512, 32, ("mean", "std"))
    assert wrap_module(module, 32, [0.5] * 3, [0.2] * 3).inferred == ()


def test_only_the_first_process_makes_clusters(library, tmp_path):
    callback = RefineAtEnd(squares(), 2, tmp_path / "out", input_size=8)
    callback.on_fit_end(types.SimpleNamespace(is_global_zero=False), pretrained(backbone=small_network()))
    assert callback.report is None
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("data", "backbone"),
    [("no/such/folder", small_network()), (squares(), nn.Conv2d(5, 8, 3))],
    ids=["data", "forward"],
)
def test_a_failure_is_logged_and_does_not_reach_the_caller_of_fit(library, tmp_path, caplog, data, backbone):
    callback = RefineAtEnd(data, 2, tmp_path / "out", input_size=8)
    callback.on_fit_end(types.SimpleNamespace(is_global_zero=True), pretrained(backbone=backbone))
    assert callback.report is None
    assert "the pretraining is complete" in caplog.text


def test_mistakes_are_refused_before_the_pretraining(library):
    with pytest.raises(UserError, match="did you mean epochs"):
        RefineAtEnd(squares(), 2, input_size=8, epoch=3)
    callback = RefineAtEnd(squares(), 2, input_size=8)
    with pytest.raises(UserError, match=r"expected a network as Module.backbone, found None; it holds encoder"):
        callback.on_fit_start(None, pretrained(encoder=small_network()))


@pytest.mark.parametrize("name", lightning_callback.LIBRARIES)
def test_a_real_trainer_runs_the_callback(tmp_path, monkeypatch, name):
    lightning = pytest.importorskip(name, reason="this Lightning is not installed")
    for other in set(lightning_callback.LIBRARIES) - {name}:
        monkeypatch.delitem(sys.modules, other, raising=False)

    class Pretraining(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone = small_network()

        def training_step(self, batch, _):
            return self.backbone(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callback = RefineAtEnd(squares(), 2, tmp_path / "out", input_size=8, epochs=1, hidden=16, device="cpu")
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    images = torch.from_numpy(squares()).permute(0, 3, 1, 2).float() / 255
    trainer.fit(Pretraining(), torch.utils.data.DataLoader(images, batch_size=20))
    assert callback.report is not None
    assert (tmp_path / "out" / "predictions.csv").is_file()
