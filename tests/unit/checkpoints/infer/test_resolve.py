"""Facts that a checkpoint left open are decided by images, or left alone."""

import pytest

from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS, candidate_normalisations
from cdc_plugin.checkpoints.infer.resolve import infer_input
from cdc_plugin.errors import DataError
from tests.helpers.trained_networks import backbone_with, network_that_saw, noise_like, small_spec

OPEN = ("mean", "std", "input_size", "stem.pool", "stem.padding", "stem.stride")


@pytest.fixture(scope="module")
def network(images):
    """A network that saw images without normalisation; the backbones below state ImageNet's."""
    return network_that_saw(images, small_spec(), NORMALISATIONS["none"])


@pytest.mark.parametrize(
    "truth",
    [
        {"pool": True, "padding": 1, "stride": 1},
        {"pool": False, "padding": 1, "stride": 1},
        {"pool": False, "padding": 2, "stride": 1},
        {"pool": False, "padding": 1, "stride": 2},
    ],
)
def test_stem_and_normalisation_are_recovered_from_images(images, truth):
    own = candidate_normalisations(images)["own"]
    network = network_that_saw(images, small_spec(**truth), own)
    resolution = infer_input(backbone_with(network, small_spec(pool=not truth["pool"]), inferred=OPEN), images)
    assert {name: resolution.backbone.spec["stem"][name] for name in truth} == truth
    assert resolution.backbone.mean.tolist() == pytest.approx(own[0], abs=0.02)
    assert resolution.backbone.std.tolist() == pytest.approx(own[1], abs=0.02)
    assert resolution.backbone.inferred == ("input_size",)
    assert set(resolution.decided) == {"mean", "std", "stem.pool", "stem.padding", "stem.stride"}
    assert resolution.mismatch == resolution.compared[0]["mismatch"] < resolution.compared[1]["mismatch"]


def test_only_open_facts_are_compared(images, network):
    resolution = infer_input(backbone_with(network, small_spec(padding=2), inferred=("stem.padding",)), images)
    assert resolution.backbone.mean.tolist() == pytest.approx(NORMALISATIONS["imagenet"][0])
    assert all(row["normalisation"] == "given" for row in resolution.compared)
    assert all(row["padding"] in (1, 2) and "pool" not in row for row in resolution.compared)


def test_nothing_open_returns_the_backbone_itself(images, network):
    backbone = backbone_with(network, small_spec(), inferred=("input_size",))
    assert infer_input(backbone, images).backbone is backbone


def test_images_of_another_kind_decide_nothing(images, network):
    backbone = backbone_with(network, small_spec(), inferred=OPEN)
    resolution = infer_input(backbone, noise_like(images))
    assert resolution.backbone is backbone
    assert not resolution.decided
    assert "unlike" in resolution.reason


def test_images_a_little_unlike_still_refute_an_absurd_normalisation_but_no_stem(images, network):
    backbone = backbone_with(network, small_spec(padding=2), inferred=OPEN)
    resolution = infer_input(backbone, (0.7 * images + 0.3 * noise_like(images, 256)).byte())
    assert 0.4 < resolution.mismatch < 0.8
    assert resolution.backbone.mean.tolist() == [0.0, 0.0, 0.0]  # ImageNet's was inferred
    assert resolution.backbone.spec["stem"]["padding"] == 2
    assert not resolution.decided
    assert set(resolution.backbone.inferred) == set(OPEN)
    assert "unlike" in resolution.reason
    assert "normalisation none" in resolution.reason


def test_images_of_another_shape_are_refused(images, network):
    with pytest.raises(DataError, match=r"\(N, 3, S, S\), found \(48, 32, 32, 3\)"):
        infer_input(backbone_with(network, small_spec(), inferred=OPEN), images.permute(0, 2, 3, 1))
