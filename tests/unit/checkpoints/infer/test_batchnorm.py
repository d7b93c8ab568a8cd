"""What BatchNorm statistics tell about stem and normalisation."""

import math

import pytest
import torch
from torch import nn

from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS, batchnorm_mismatch, candidate_normalisations, settle
from cdc_plugin.checkpoints.infer.max_pool import expected_activation, pool_by_weights
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone

OPEN = ("mean", "std", "input_size", "stem.pool", "stem.padding", "stem.stride")


def spec(**stem):
    usual = {"kernel": 3, "stride": 1, "padding": 1, "pool": False}
    return {
        "family": "resnet",
        "block": "basic",
        "depths": [1, 1, 1, 1],
        "widths": [8, 8, 12, 16],
        "stem": usual | stem,
    }


@pytest.fixture(scope="module")
def images():
    """Smooth coloured blobs (48, 3, 32, 32) in 0..255, darker than ImageNet."""
    coarse = torch.rand(48, 3, 5, 5, generator=torch.Generator().manual_seed(0)).pow(2)
    return nn.functional.interpolate(coarse, size=32, mode="bicubic").clamp(0, 1).mul(200).byte()


def trained(true_spec, images, normalisation):
    """A network whose BatchNorm layers have seen the images in the given normalisation."""
    generator = torch.Generator().manual_seed(1)
    network, size = build(true_spec)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = torch.randn(module.weight.shape, generator=generator) * 0.1
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.bias.data = torch.randn(module.bias.shape, generator=generator) * 0.3
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in normalisation)
    with torch.no_grad():
        network.train()((images.float() / 255 - mean) / std)
    return network.eval(), size


def inferred(network, size, stem, facts=OPEN):
    given = NORMALISATIONS["imagenet"]
    guessed, _ = build(spec(**stem))
    guessed.load_state_dict(network.state_dict())
    return Backbone(guessed, size, *given, 32, spec(**stem), facts)


def test_mismatch_of_one_layer_agrees_with_the_sum_by_hand():
    layer = nn.BatchNorm2d(1, eps=0.0).eval()
    layer.running_mean.fill_(1.0)
    layer.running_var.fill_(4.0)
    values = torch.tensor([2.0, 4.0]).view(2, 1, 1, 1)  # mean 3, variance 1
    assert batchnorm_mismatch(layer, values) == pytest.approx(2 / 2 + math.log(4))


def test_mismatch_is_zero_for_what_was_seen_and_ignores_the_order_of_images(images):
    network, _ = trained(spec(), images, NORMALISATIONS["none"])
    seen = images.float() / 255
    found = batchnorm_mismatch(network, seen)
    assert found < 0.02
    assert batchnorm_mismatch(network, seen.flip(0)) == pytest.approx(found, abs=1e-4)
    assert batchnorm_mismatch(network, seen * 2) > 10 * found


def test_mismatch_leaves_mode_statistics_and_hooks_as_they_were(images):
    network, _ = trained(spec(), images, NORMALISATIONS["none"])
    before = {key: value.clone() for key, value in network.state_dict().items()}
    network.train()
    batchnorm_mismatch(network, images.float() / 255)
    assert network.training
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_network_without_batchnorm_cannot_be_compared():
    with pytest.raises(UserError, match="no BatchNorm"):
        batchnorm_mismatch(nn.Conv2d(3, 2, 3), torch.zeros(1, 3, 8, 8))


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
    network, size = trained(spec(**truth), images, own)
    found = settle(inferred(network, size, {"pool": not truth["pool"]}), images)
    assert {name: found.backbone.spec["stem"][name] for name in truth} == truth
    assert found.backbone.mean.tolist() == pytest.approx(own[0], abs=0.02)
    assert found.backbone.std.tolist() == pytest.approx(own[1], abs=0.02)
    assert found.backbone.inferred == ("input_size",)
    assert set(found.settled) == {"mean", "std", "stem.pool", "stem.padding", "stem.stride"}
    assert found.mismatch == found.compared[0]["mismatch"] < found.compared[1]["mismatch"]


def test_only_what_is_assumed_is_settled(images):
    network, size = trained(spec(padding=2), images, NORMALISATIONS["none"])
    found = settle(inferred(network, size, {}, facts=("stem.padding",)), images)
    assert found.backbone.mean.tolist() == pytest.approx(NORMALISATIONS["imagenet"][0])
    assert all(row["normalisation"] == "given" for row in found.compared)
    assert all(row["padding"] in (1, 2) and "pool" not in row for row in found.compared)


def test_nothing_open_returns_the_backbone_itself(images):
    network, size = trained(spec(), images, NORMALISATIONS["none"])
    backbone = inferred(network, size, {}, facts=("input_size",))
    assert settle(backbone, images).backbone is backbone


def test_images_of_another_kind_decide_nothing(images):
    network, size = trained(spec(), images, NORMALISATIONS["none"])
    backbone = inferred(network, size, {})
    noise = torch.randint(0, 2, images.shape, generator=torch.Generator().manual_seed(2)).mul(255).byte()
    found = settle(backbone, noise)
    assert found.backbone is backbone
    assert not found.settled
    assert "unlike" in found.reason


def test_images_a_little_unlike_still_refute_an_absurd_normalisation_but_no_stem(images):
    network, size = trained(spec(), images, NORMALISATIONS["none"])
    backbone = inferred(network, size, {"padding": 2})
    noise = torch.randint(0, 256, images.shape, generator=torch.Generator().manual_seed(2))
    found = settle(backbone, (0.7 * images + 0.3 * noise).byte())
    assert 0.4 < found.mismatch < 0.8
    assert found.backbone.mean.tolist() == [0.0, 0.0, 0.0]  # ImageNet's was inferred
    assert found.backbone.spec["stem"]["padding"] == 2
    assert not found.settled
    assert set(found.backbone.inferred) == set(OPEN)
    assert "unlike" in found.reason
    assert "normalisation none" in found.reason


def test_images_of_another_shape_are_refused(images):
    network, size = trained(spec(), images, NORMALISATIONS["none"])
    with pytest.raises(UserError, match=r"\(N, 3, S, S\), found \(48, 32, 32, 3\)"):
        settle(inferred(network, size, {}), images.permute(0, 2, 3, 1))


def test_expected_activation_of_one_draw_is_the_rectified_gaussian_mean():
    shift, scale = torch.tensor([0.0, 1.0]), torch.tensor([1.0, -2.0])
    normal = torch.distributions.Normal(0.0, 1.0)
    ratio = shift / scale.abs()
    closed = shift * normal.cdf(ratio) + scale.abs() * normal.log_prob(ratio).exp()
    assert expected_activation(shift, scale, 1).tolist() == pytest.approx(closed.tolist(), abs=1e-5)
    assert expected_activation(shift, scale, 1)[0].item() == pytest.approx(1 / math.sqrt(2 * math.pi), abs=1e-5)


def test_expected_activation_of_two_draws_agrees_with_sampling():
    draws = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0)).amax(dim=1)
    sampled = torch.relu(0.3 + 0.5 * draws).mean().item()
    exact = expected_activation(torch.tensor([0.3]), torch.tensor([0.5]), 2).item()
    assert exact == pytest.approx(sampled, abs=3e-3)


@pytest.mark.parametrize("pool", [True, False])
def test_pool_is_guessed_without_images(images, pool):
    network, _ = trained(spec(pool=pool), images, NORMALISATIONS["cifar10"])
    guess = pool_by_weights(network.state_dict())
    assert guess.kept is pool


def test_untrained_statistics_give_no_clear_guess_and_no_pool():
    guess = pool_by_weights(build(spec(pool=True))[0].state_dict())
    assert not guess.kept
    assert not guess.clear
