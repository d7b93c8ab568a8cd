import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional as oracle

from cdc_plugin.data.images import open_images
from cdc_plugin.data.views.pretext import (
    PretextSettings,
    change_brightness,
    change_contrast,
    change_saturation,
    gaussian_blur,
    pretext_view,
    shift_hue,
)
from cdc_plugin.errors import UserError

PLAIN = {"flip": False, "crop_scale": 1.0, "jitter_share": 0.0, "grayscale": 0.0, "blur": 0.0}


def settings(size: int = 32, **changes) -> PretextSettings:
    return PretextSettings(size, (0.0,) * 3, (1.0,) * 3, **{**PLAIN, **changes})


@pytest.fixture
def pixels(randomness) -> torch.Tensor:
    """Colours in [0, 1], (6, 3, 12, 12), gray and black among them."""
    made = torch.rand(6, 3, 12, 12, generator=randomness)
    made[0] = made[0, :1]
    made[1] = 0
    return made


@pytest.mark.parametrize(
    ("change", "reference", "amounts"),
    [
        (change_brightness, oracle.adjust_brightness, [0.6, 0.8, 1.0, 1.1, 1.4, 0.0]),
        (change_contrast, oracle.adjust_contrast, [0.6, 0.8, 1.0, 1.1, 1.4, 0.0]),
        (change_saturation, oracle.adjust_saturation, [0.6, 0.8, 1.0, 1.1, 1.4, 0.0]),
        (shift_hue, oracle.adjust_hue, [-0.1, 0.1, 0.0, 0.05, 0.5, -0.5]),
    ],
)
def test_a_colour_change_equals_that_of_torchvision(change, reference, amounts, pixels):
    changed = change(pixels, torch.tensor(amounts))
    for image, amount, mine in zip(pixels, amounts, changed, strict=True):
        # torchvision weighs the channels with rounded numbers.
        assert torch.allclose(mine, reference(image, amount), atol=2e-4)


def test_blur_equals_torchvision_away_from_the_border_and_leaves_flat_images_flat(randomness):
    images = torch.rand(2, 3, 40, 40, generator=randomness)
    blurred = gaussian_blur(images, torch.tensor([0.5, 2.0]))
    for image, sigma, mine in zip(images, (0.5, 2.0), blurred, strict=True):
        theirs = oracle.gaussian_blur(image, [25, 25], [sigma, sigma])
        assert torch.allclose(mine[:, 14:-14, 14:-14], theirs[:, 14:-14, 14:-14], atol=1e-4)
    flat = torch.full((1, 3, 16, 16), 0.3)  # up to the border
    assert torch.allclose(gaussian_blur(flat, torch.tensor([2.0])), flat, atol=1e-6)


def test_a_view_without_any_change_is_the_image(digits, randomness):
    images = torch.from_numpy(digits[0][:5]).permute(0, 3, 1, 2)
    view = pretext_view(images, settings(), randomness)
    # A crop of the whole image still takes another aspect; where none fits the image is taken as it is.
    assert view.shape == (5, 3, 32, 32)
    assert view.min() >= 0
    assert view.max() <= 1
    constant = pretext_view(torch.full((4, 3, 32, 32), 51, dtype=torch.uint8), settings(), randomness)
    assert torch.allclose(constant, torch.full((4, 3, 32, 32), 0.2), atol=1e-5)


def test_a_share_of_the_views_is_gray(randomness):
    images = torch.zeros(400, 3, 8, 8, dtype=torch.uint8)
    images[:, 0] = 200
    views = pretext_view(images, settings(8, grayscale=0.25), randomness)
    gray = (views[:, 0] == views[:, 1]).flatten(1).all(dim=1)
    assert 0.17 < gray.float().mean() < 0.33
    assert torch.allclose(views[gray][:, 0], torch.tensor(200 / 255 * 0.299), atol=1e-4)


def test_a_share_of_the_views_is_blurred(randomness):
    board = (np.indices((16, 16)).sum(axis=0) % 2 * 255).astype(np.uint8)
    images = torch.from_numpy(board).expand(200, 3, 16, 16).contiguous()
    sharp = pretext_view(images, settings(16), randomness).flatten(1).std(dim=1)
    mixed = pretext_view(images, settings(16, blur=0.5), randomness).flatten(1).std(dim=1)
    assert mixed.mean() < 0.8 * sharp.mean()


def test_a_share_of_the_views_is_solarised_as_in_pillow(randomness):
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(300, 3, 16, 16).contiguous()
    views = pretext_view(levels, settings(16, solarize=0.2), torch.Generator().manual_seed(1))
    plain = pretext_view(levels, settings(16), torch.Generator().manual_seed(1))
    changed = (views != plain).flatten(1).any(dim=1)
    assert 0.13 < changed.float().mean() < 0.27
    for mine, before in zip(views[changed], plain[changed], strict=True):
        image = Image.fromarray((before * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
        theirs = np.asarray(ImageOps.solarize(image)).transpose(2, 0, 1) / 255
        near = (before * 255 - 127.5).abs() > 0.6  # between 127 and 128 rounding decides
        assert torch.allclose(mine[near], torch.from_numpy(theirs).float()[near], atol=0.6 / 255)


def test_mirrored_views_appear_only_if_asked_for(randomness):
    images = torch.zeros(50, 3, 8, 8, dtype=torch.uint8)
    images[..., :2] = 255  # bright on the left
    left = pretext_view(images, settings(8), randomness)
    assert (left[..., 0].mean(dim=(1, 2)) > left[..., -1].mean(dim=(1, 2))).all()
    both = pretext_view(images, settings(8, flip=True), randomness)
    mirrored = both[..., 0].mean(dim=(1, 2)) < both[..., -1].mean(dim=(1, 2))
    assert 10 < mirrored.sum() < 40


def test_the_same_generator_gives_the_same_views_and_another_others():
    images = open_images("digits", 32, labels=False).batch(range(6))
    full = PretextSettings(32, (0.3,) * 3, (0.3,) * 3)
    one, two, other = (pretext_view(images, full, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.allclose(one, other)
    assert torch.isfinite(one).all()
    assert one.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"crop_scale": 0.0}, "crop_scale"),
        ({"jitter": (0.4, 0.4)}, "jitter takes 4"),
        ({"jitter": (0.4, 0.4, 0.4, 0.6)}, "hue"),
        ({"blur": 1.5}, "blur"),
        ({"solarize": -0.1}, "solarize"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, word):
    with pytest.raises(UserError, match=word):
        settings(**change)
