"""Train the last blocks of a network alone, and recompute blocks."""

import pytest
import timm
import torch
from torchvision import models

from cdc_plugin.errors import ConfigError
from cdc_plugin.models.blocks import find_unchanged, recompute_blocks, train_last_blocks


def changing(network):
    return [name for name, parameter in network.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("make", "count", "first"),
    [
        (lambda: timm.create_model("test_vit", num_classes=0), 1, "blocks.5."),
        (lambda: timm.create_model("test_vit", num_classes=0), 6, "blocks.0."),
        (lambda: timm.create_model("test_convnext", num_classes=0), 2, "stages.3.blocks.0."),
        (models.resnet18, 2, "layer4.0."),
    ],
)
def test_what_comes_before_the_last_blocks_does_not_change(make, count, first):
    network = make()
    train_last_blocks(network, count)
    names = [name for name, _ in network.named_parameters()]
    place = next(place for place, name in enumerate(names) if name.startswith(first))
    assert changing(network) == names[place:]
    still = find_unchanged(network)
    assert not any(weight.requires_grad for part in still for weight in part.parameters())
    early = [part for name, part in network.named_modules() if name in ("bn1", "patch_embed", "stem", "layer1.0")]
    assert early
    assert all(part in still for part in early)


def test_more_blocks_than_there_are_and_networks_without_any_are_refused():
    with pytest.raises(ConfigError, match="at most 6"):
        train_last_blocks(timm.create_model("test_vit"), 7)
    with pytest.raises(ConfigError, match="no blocks"):
        train_last_blocks(torch.nn.Linear(2, 2), 1)


def test_recomputed_blocks_give_the_same_gradients_and_batchnorm_refuses():
    network = timm.create_model("test_vit", num_classes=0)
    images = torch.randn(2, 3, 160, 160)
    network(images).sum().backward()
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    recompute_blocks(network)
    network.zero_grad()
    network(images).sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in network.parameters()], gradients)
    for other in (timm.create_model("test_resnet"), torch.nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match="does not suit"):
            recompute_blocks(other)
