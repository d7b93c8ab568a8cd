"""Stated facts are doubted as well: whether a network and its images fit each other."""

import pytest
import torch
from torch import nn

from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS
from cdc_plugin.checkpoints.infer.resolve import check_input
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone
from tests.helpers.trained_networks import backbone_with, network_that_saw, noise_like, small_spec


def stated(images, truth, stated_as, seen="cifar10", stated_normalisation="cifar10", size=32):
    """Return a backbone that states one stem and normalisation while its weights remember another."""
    network = network_that_saw(images, truth, NORMALISATIONS[seen])
    return backbone_with(network, stated_as, stated_normalisation, size=size)


def test_right_facts_fit_and_variants_are_sorted(images):
    check = check_input(stated(images, small_spec(), small_spec()), images)
    assert check.verdict == "fits"
    assert check.variants[0].changed == {}
    mismatches = [variant.mismatch for variant in check.variants]
    assert mismatches == sorted(mismatches)
    assert sum(variant.changed == {} for variant in check.variants) == 1


@pytest.mark.parametrize(("truth", "said"), [(1, 2), (2, 1)])
def test_wrong_padding_is_found_although_it_is_stated(images, truth, said):
    check = check_input(stated(images, small_spec(padding=truth), small_spec(padding=said)), images)
    assert check.verdict == "other"
    assert check.variants[0].changed == {"stem.padding": truth}
    assert f"padding {truth}" in check.words


def test_wrong_normalisation_is_found_although_it_is_stated(images):
    check = check_input(stated(images, small_spec(), small_spec(), "none", "imagenet"), images)
    assert check.verdict == "other"
    assert "no normalisation" in check.words
    assert check.variants[0].changed["mean"] == [0.0, 0.0, 0.0]


def test_two_wrong_facts_are_found_together(images):
    check = check_input(stated(images, small_spec(padding=2), small_spec(), "none", "imagenet"), images)
    assert check.verdict == "other"
    assert check.variants[0].changed["stem.padding"] == 2
    assert "normalisation and stem" in check.words


def test_images_enlarged_beyond_those_of_the_training_are_noticed(images):
    spec = small_spec(kernel=7, padding=3, stride=2, pool=True)
    large = nn.functional.interpolate(images.float(), size=128, mode="bilinear")
    check = check_input(stated(images, spec, spec, size=128), large)
    assert check.verdict == "other"
    assert "image size 32" in check.words
    assert check.variants[0].changed == {"input_size": 32}


def test_images_of_another_kind_are_unlike(images):
    check = check_input(stated(images, small_spec(), small_spec()), noise_like(images))
    assert check.verdict == "unlike"


def test_network_without_batchnorm_or_training_says_nothing(images):
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    check = check_input(Backbone(plain, 4, (0.5,) * 3, (0.5,) * 3, 32), images)
    assert (check.verdict, check.variants) == ("unknown", ())
    network, size = build(small_spec())
    with torch.no_grad():
        check = check_input(Backbone(network, size, (0.5,) * 3, (0.5,) * 3, 32, small_spec()), images)
    assert (check.verdict, check.variants) == ("untrained", ())
