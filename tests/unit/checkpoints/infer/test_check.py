"""Stated facts are doubted as well: what BatchNorm statistics say of a network and its images."""

import pytest
import torch
from torch import nn

from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS
from cdc_plugin.checkpoints.infer.check import verify
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone


def spec(**stem):
    usual = {"kernel": 3, "stride": 1, "padding": 1, "pool": False}
    return {"family": "resnet", "block": "basic", "depths": [1] * 4, "widths": [8, 8, 12, 16], "stem": usual | stem}


@pytest.fixture(scope="module")
def images():
    """Smooth coloured blobs (48, 3, 32, 32) in 0..255."""
    coarse = torch.rand(48, 3, 5, 5, generator=torch.Generator().manual_seed(0)).pow(2)
    return nn.functional.interpolate(coarse, size=32, mode="bicubic").clamp(0, 1).mul(200)


def stated(true_spec, images, normalisation="cifar10", said=None, said_normalisation=None, size=32):
    """A network that has seen the images one way, and a backbone that states another; nothing is inferred."""
    generator = torch.Generator().manual_seed(1)
    network, feature_dim = build(true_spec)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = torch.randn(module.weight.shape, generator=generator) * 0.1
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.bias.data = torch.randn(module.bias.shape, generator=generator) * 0.3
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in NORMALISATIONS[normalisation])
    with torch.no_grad():
        network.train()((images / 255 - mean) / std)
    other, _ = build(said or true_spec)
    other.load_state_dict(network.state_dict())
    return Backbone(
        other.eval(), feature_dim, *NORMALISATIONS[said_normalisation or normalisation], size, said or true_spec
    )


def test_right_facts_fit(images):
    found = verify(stated(spec(), images), images)
    assert found.verdict == "fits"
    assert found.variants[0].changed == {}
    assert found.variants[0].words == "as it stands"


@pytest.mark.parametrize(("truth", "said"), [(1, 2), (2, 1)])
def test_wrong_padding_is_told_although_it_is_stated(images, truth, said):
    found = verify(stated(spec(padding=truth), images, said=spec(padding=said)), images)
    assert found.verdict == "other"
    assert found.variants[0].changed == {"stem.padding": truth}
    assert f"another stem fits better: padding {truth}" in found.words


def test_wrong_normalisation_is_told_although_it_is_stated(images):
    found = verify(stated(spec(), images, "none", said_normalisation="imagenet"), images)
    assert found.verdict == "other"
    assert "normalisation fits better: no normalisation" in found.words
    assert found.variants[0].changed["mean"] == [0.0, 0.0, 0.0]


def test_two_wrong_facts_are_found_together(images):
    backbone = stated(spec(padding=2), images, "none", said=spec(), said_normalisation="imagenet")
    found = verify(backbone, images)
    assert found.verdict == "other"
    assert found.variants[0].changed["stem.padding"] == 2
    assert "another normalisation and stem fits better" in found.words


def test_images_enlarged_beyond_those_of_the_training_are_told(images):
    backbone = stated(spec(kernel=7, padding=3, stride=2, pool=True), images, size=128)
    large = nn.functional.interpolate(images, size=128, mode="bilinear")
    found = verify(backbone, large)
    assert found.verdict == "other"
    assert "image size 32" in found.words
    assert found.variants[0].changed == {"input_size": 32}


def test_images_of_another_kind_are_unlike(images):
    noise = torch.randint(0, 2, images.shape, generator=torch.Generator().manual_seed(2)).mul(255.0)
    found = verify(stated(spec(), images), noise)
    assert found.verdict == "unlike"
    assert found.words.startswith("the images are unlike the training images")


def test_network_without_batchnorm_tells_nothing(images):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = verify(Backbone(network, 4, (0.5,) * 3, (0.5,) * 3, 32), images)
    assert (found.verdict, found.variants) == ("unknown", ())


def test_statistics_as_initialised_are_named(images):
    network, size = build(spec())
    assert verify(Backbone(network, size, (0.5,) * 3, (0.5,) * 3, 32, spec()), images).verdict == "untrained"


def test_variants_are_sorted_and_the_network_itself_is_among_them(images):
    found = verify(stated(spec(), images), images)
    mismatches = [variant.mismatch for variant in found.variants]
    assert mismatches == sorted(mismatches)
    assert sum(variant.changed == {} for variant in found.variants) == 1
