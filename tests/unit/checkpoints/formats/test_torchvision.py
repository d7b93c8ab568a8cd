"""torchvision's classifiers beside its ResNets, told by their names and shapes or by the user."""

import pytest
import torch
from torch import nn
from torchvision import models

from cdc_plugin.checkpoints import Wanted, load_checkpoint
from tests.helpers.checkpoint_builders.networks import with_noise


@pytest.mark.parametrize("name", ["regnet_x_400mf", "mnasnet0_5", "swin_v2_t"])
@pytest.mark.parametrize("stated", [True, False])
def test_features_are_those_before_the_classifier(tmp_path, name, stated):
    network = with_noise(models.get_model(name))
    torch.save(network.state_dict(), tmp_path / "a.pth")
    found = load_checkpoint(tmp_path / "a.pth", wanted=Wanted(arch=name if stated else None))
    setattr(network, next(part for part in ("fc", "head", "classifier") if hasattr(network, part)), nn.Identity())
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(found.backbone.eval()(images), network(images), rtol=1e-4, atol=1e-4)
    assert found.backbone.spec["name"] == name
