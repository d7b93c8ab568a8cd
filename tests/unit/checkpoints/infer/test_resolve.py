"""Facts that a checkpoint left open are decided by images, or left alone; stated ones are doubted."""

import pytest
from torch import nn

from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS, candidate_normalisations
from cdc_plugin.checkpoints.infer.resolve import TRUSTED_MISMATCH, check_input, infer_input, resolve_input
from cdc_plugin.data.images import open_images
from cdc_plugin.errors import DataError
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone
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
    backbone = backbone_with(network, small_spec(), inferred=("input_size",))
    assert infer_input(backbone, images).backbone is backbone
    resolution = infer_input(backbone_with(network, small_spec(padding=2), inferred=("stem.padding",)), images)
    assert resolution.backbone.mean.tolist() == pytest.approx(NORMALISATIONS["imagenet"][0])
    assert all(row["normalisation"] == "given" for row in resolution.compared)
    assert all(row["padding"] in (1, 2) and "pool" not in row for row in resolution.compared)


def test_images_of_another_kind_decide_nothing_and_of_another_shape_are_refused(images, network):
    backbone = backbone_with(network, small_spec(), inferred=OPEN)
    resolution = infer_input(backbone, noise_like(images))
    assert resolution.backbone is backbone
    assert not resolution.decided
    assert "unlike" in resolution.reason
    with pytest.raises(DataError, match=r"\(N, 3, S, S\), found \(48, 32, 32, 3\)"):
        infer_input(backbone, images.permute(0, 2, 3, 1))


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


def stated(images, truth, stated_as, seen="cifar10", stated_normalisation="cifar10", size=32):
    """Return a backbone that states one stem and normalisation while its weights remember another."""
    network = network_that_saw(images, truth, NORMALISATIONS[seen])
    return backbone_with(network, stated_as, stated_normalisation, size=size)


def test_right_facts_fit_images_alike_but_no_noise_and_variants_are_sorted(images):
    backbone = stated(images, small_spec(), small_spec())
    assert check_input(backbone, noise_like(images)).verdict == "unlike"
    check = check_input(backbone, images)
    assert (check.verdict, check.variants[0].changed) == ("fits", {})
    mismatches = [variant.mismatch for variant in check.variants]
    assert mismatches == sorted(mismatches)
    assert sum(variant.changed == {} for variant in check.variants) == 1


NOT_NORMALISED = {"normalisation": "none", "mean": [0.0] * 3, "std": [1.0] * 3}


@pytest.mark.parametrize(
    ("truth", "said", "normalisations", "changed", "words"),
    [
        (1, 2, ("cifar10", "cifar10"), {"stem.padding": 1}, "another stem fits better: padding 1"),
        (2, 1, ("cifar10", "cifar10"), {"stem.padding": 2}, "another stem fits better: padding 2"),
        (1, 1, ("none", "imagenet"), NOT_NORMALISED, "no normalisation"),
        (2, 1, ("none", "imagenet"), NOT_NORMALISED | {"stem.padding": 2}, "normalisation and stem"),
    ],
)
def test_wrong_facts_are_found_although_they_are_stated(images, truth, said, normalisations, changed, words):
    backbone = stated(images, small_spec(padding=truth), small_spec(padding=said), *normalisations)
    check = check_input(backbone, images)
    assert (check.verdict, check.variants[0].changed) == ("other", changed)
    assert words in check.words


def test_images_behind_augmented_views_and_single_images_raise_no_alarm(images):
    blurred = nn.functional.avg_pool2d(images.float(), 7, stride=1, padding=3, count_include_pad=False)
    backbone = stated(blurred, small_spec(), small_spec())
    check = check_input(backbone, images)
    assert check.variants[0].mismatch > TRUSTED_MISMATCH
    assert check.verdict == "fits"
    assert {check_input(backbone, image[None]).verdict for image in images[:8]} == {"unknown"}
    assert check_input(backbone, noise_like(images[:1])).verdict == "unlike"


def test_slight_difference_counts_for_many_images_alone_and_warns_in_a_run(images, caplog):
    network = network_that_saw(images, small_spec(), NORMALISATIONS["cifar10"])
    verdicts, many = [], images.repeat(4, 1, 1, 1)
    for factor, count in ((1.2, 16), (1.2, len(many)), (1.0, len(many))):
        backbone = backbone_with(network, small_spec(), "cifar10")
        backbone.mean.mul_(factor)
        backbone.module.bn1.num_batches_tracked.fill_(100)
        verdicts.append(check_input(backbone, many[:count]).verdict)
        resolve_input(backbone, open_images(many[:count].permute(0, 2, 3, 1).numpy(), 32))
    assert verdicts == ["fits", "other", "fits"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_single_image_settles_nothing_and_unlike_images_leave_a_warning(images, network, caplog):
    for given, warned in ((images[:1], 0), (images, 0), (noise_like(images), 1)):
        caplog.clear()
        backbone = backbone_with(network, small_spec(), inferred=OPEN)
        resolved = resolve_input(backbone, open_images(given.permute(0, 2, 3, 1).numpy(), 32))
        assert ("mean" in resolved.inferred) == (len(given) == 1 or warned == 1)
        assert sum("are assumed" in record.getMessage() for record in caplog.records) == warned


def test_images_enlarged_beyond_those_of_the_training_are_noticed(images):
    spec = small_spec(kernel=7, padding=3, stride=2, pool=True)
    large = nn.functional.interpolate(images.float(), size=128, mode="bilinear")
    check = check_input(stated(images, spec, spec, size=128), large)
    assert check.verdict == "other"
    assert "image size 32" in check.words
    assert check.variants[0].changed == {"input_size": 32}


def test_network_without_batchnorm_or_training_says_nothing(images):
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    check = check_input(Backbone(plain, 4, (0.5,) * 3, (0.5,) * 3, 32), images)
    assert (check.verdict, check.variants) == ("unknown", ())
    network, size = build(small_spec())
    check = check_input(Backbone(network, size, (0.5,) * 3, (0.5,) * 3, 32, small_spec()), images)
    assert (check.verdict, check.variants) == ("untrained", ())
