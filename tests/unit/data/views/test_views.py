import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms import RandomResizedCrop

from cdc_plugin.data import views
from cdc_plugin.data.views import OPERATIONS, ViewSettings, plain_view, strong_view, weak_view
from cdc_plugin.data.views.operations import COLOUR_OPERATIONS, GEOMETRIC_OPERATIONS, random_crops, warp
from cdc_plugin.errors import UserError

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}  # views in levels from 0 to 255
WHOLE = torch.tensor([[1.0, 1.0, 0.0, 0.0]])  # the crop that is the whole image

PILLOW_COLOUR = {
    "autocontrast": lambda image, v: ImageOps.autocontrast(image),
    "equalize": lambda image, v: ImageOps.equalize(image),
    "solarize": lambda image, v: ImageOps.solarize(image, v),
    "posterize": lambda image, v: ImageOps.posterize(image, int(v)),
    "color": lambda image, v: ImageEnhance.Color(image).enhance(v),
    "contrast": lambda image, v: ImageEnhance.Contrast(image).enhance(v),
    "brightness": lambda image, v: ImageEnhance.Brightness(image).enhance(v),
    "sharpness": lambda image, v: ImageEnhance.Sharpness(image).enhance(v),
}


def affine(image, *coefficients):
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)


PILLOW_GEOMETRY = {
    "rotate": lambda image, v: image.rotate(v, Image.Resampling.BILINEAR),
    "shear_x": lambda image, v: affine(image, 1, v, 0, 0, 1, 0),
    "shear_y": lambda image, v: affine(image, 1, 0, 0, v, 1, 0),
    "translate_x": lambda image, v: affine(image, 1, 0, v * image.width, 0, 1, 0),
    "translate_y": lambda image, v: affine(image, 1, 0, 0, 0, 1, v * image.height),
}


def noise(count=6, side=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
    images[1] = images[1] // 4 + 90  # low contrast: a narrow histogram
    return images


def smooth(side=48):
    """Images without edges, so that ways of interpolating agree."""
    line = torch.linspace(0, 3, side)
    waves = [torch.sin(line[:, None] * (k + 1) + k) * torch.cos(line[None] * 2) for k in range(6)]
    return (torch.stack(waves).view(2, 3, side, side) * 120 + 128).to(torch.uint8)


def as_pil(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pil(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", COLOUR_OPERATIONS)
def test_colour_operation_equals_pillow_up_to_one_level(name):
    operation, low, high = COLOUR_OPERATIONS[name]
    images = torch.cat([noise(), smooth(40)])
    magnitude = torch.linspace(low, high, len(images))
    result = operation(images, magnitude)
    for image, value, ours in zip(images, magnitude, result, strict=True):
        expected = from_pil(PILLOW_COLOUR[name](as_pil(image), float(value)))
        difference = (ours.int() - expected.int()).abs().max()
        assert difference <= (0 if name in ("equalize", "solarize", "posterize") else 1)
    assert len(OPERATIONS) == 14  # as in the paper


@pytest.mark.parametrize("name", GEOMETRIC_OPERATIONS)
@pytest.mark.parametrize("place", [0.0, 0.3, 1.0])
def test_geometric_operation_equals_pillow_within_interpolation(name, place):
    operation, low, high = GEOMETRIC_OPERATIONS[name]
    images = smooth()
    value = low + (high - low) * place
    maps = operation(torch.full((2,), value))
    ours = warp(images.float(), WHOLE.repeat(2, 1), torch.ones(2), maps, 48)
    for image, result in zip(images, ours, strict=True):
        expected = from_pil(PILLOW_GEOMETRY[name](as_pil(image), value)).float()
        # At the black border a pixel may fall on either side.
        difference = (result - expected).abs()
        assert (difference > 6).float().mean() < 0.04
        assert difference.median() <= 1


def test_a_shift_brings_in_black_even_if_the_crop_has_more_to_show_and_the_whole_crop_is_the_image():
    light, shift = torch.full((1, 3, 32, 32), 200.0), GEOMETRIC_OPERATIONS["translate_x"][0](torch.tensor([0.25]))
    shifted = warp(light, torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.ones(1), shift, 16)
    assert (shifted[..., :12] == 200).all()
    assert (shifted[..., 12:] == 0).all()
    images = noise().float()
    same = warp(images, WHOLE.repeat(6, 1), torch.ones(6), None, 40)
    assert torch.allclose(same, images, atol=1e-2)
    mirrored = warp(images, WHOLE.repeat(6, 1), -torch.ones(6), None, 40)
    assert torch.allclose(mirrored, images.flip(3), atol=1e-2)


def test_crops_lie_within_the_image_and_follow_torchvision():
    crops = random_crops(20_000, 0.2, (3 / 4, 4 / 3), generator())
    half, centre = crops[:, :2], crops[:, 2:]
    assert ((half + centre.abs()) <= 1 + 1e-6).all()
    area, ratio = half.prod(dim=1), half[:, 0] / half[:, 1]
    assert area.min() >= 0.2 - 1e-6
    assert 3 / 4 - 1e-5 <= ratio.min() <= ratio.max() <= 4 / 3 + 1e-5
    torch.manual_seed(0)
    image = torch.zeros(3, 400, 400)
    boxes = [RandomResizedCrop.get_params(image, (0.2, 1.0), (3 / 4, 4 / 3)) for _ in range(4000)]
    oracle = torch.tensor([height * width / 160_000 for _, _, height, width in boxes])
    levels = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    assert torch.allclose(area.quantile(levels), oracle.quantile(levels), atol=0.02)


def test_plain_view_is_the_image_normalised():
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    images = noise(2, 32)
    expected = (images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(plain_view(images, ViewSettings(32, mean, std)), expected, atol=1e-5)
    for size in (24, 112):
        assert plain_view(images, ViewSettings(size, **PLAIN)).shape == (2, 3, size, size)
    large = noise(2, 256)  # with the margin, which is left out
    view = plain_view(large, ViewSettings(224, **PLAIN))
    assert torch.allclose(view, large[:, :, 16:240, 16:240].float(), atol=1e-3)


def test_views_depend_on_the_seed_and_neither_use_nor_change_the_global_random_state():
    images, settings = noise(), ViewSettings(32, **PLAIN)
    for view in (weak_view, strong_view):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = view(images, settings, generator(3))
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        assert torch.equal(view(images, settings, generator(3)), first)
        assert not torch.equal(view(images, settings, generator(4)), first)


@pytest.mark.parametrize("level", [0, 128, 255])
def test_constant_images_give_no_nan(level):
    images = torch.full((64, 3, 32, 32), level, dtype=torch.uint8)
    assert strong_view(images, ViewSettings(32, **PLAIN), generator()).isfinite().all()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("stored", "size"), [(8, 8), (32, 32), (32, 64), (146, 128)])
def test_strong_view_has_the_input_size_and_stays_in_range(count, stored, size):
    view = strong_view(noise(max(count, 2), stored)[:count], ViewSettings(size, **PLAIN), generator())
    assert view.shape == (count, 3, size, size)
    assert view.min() >= 0
    assert view.max() <= 255 + 1e-3


def test_hole_is_one_square_of_zeros_after_normalising():
    settings = ViewSettings(32, (0.0,) * 3, (1.0,) * 3, operations=0, crop_scale=1.0, aspect=(1, 1), cutout=10)
    view = strong_view(torch.full((300, 3, 32, 32), 255, dtype=torch.uint8), settings, generator())
    hole = view == 0
    assert torch.equal(hole[:, 0], hole[:, 1])
    heights, widths = hole[:, 0].any(2).sum(1), hole[:, 0].any(1).sum(1)
    assert torch.equal(hole[:, 0].sum((1, 2)), heights * widths)
    assert heights.min() >= 1
    assert heights.max() == 10
    assert ((view == 0) | ((view - 1).abs() < 1e-5)).all()
    assert [ViewSettings(size, **PLAIN).largest_hole for size in (32, 64, 224)] == [16, 32, 32]


def test_without_operations_and_hole_a_strong_view_is_a_weak_view():
    images = smooth(32)
    settings = ViewSettings(32, **PLAIN, operations=0, cutout=0)
    strong, weak = strong_view(images, settings, generator()), weak_view(images, settings, generator())
    assert torch.allclose(strong, weak, atol=0.51)


def test_flip_off_mirrors_nothing_and_on_mirrors_half():
    ramp = torch.arange(32, dtype=torch.uint8).mul(8).expand(400, 3, 32, 32)
    kept = weak_view(ramp, ViewSettings(32, **PLAIN, flip=False), generator())
    assert (kept[..., -1] > kept[..., 0]).all()
    flipped = weak_view(ramp, ViewSettings(32, **PLAIN), generator())
    share = (flipped[:, 0, 0, -1] < flipped[:, 0, 0, 0]).float().mean()
    assert 0.4 < share < 0.6


@pytest.mark.parametrize("only", OPERATIONS)
def test_each_operation_alone_goes_to_the_image_that_drew_it(only, monkeypatch):
    others = tuple(name for name in OPERATIONS if name != only)
    still = {"cutout": 0, "crop_scale": 1.0, "aspect": (1, 1), "flip": False}
    images, drawn = noise(), torch.linspace(0, 0.99, 6)
    monkeypatch.setattr(views.torch, "rand", lambda *shape, generator: drawn.expand(*shape).clone())
    view = strong_view(images, ViewSettings(40, **PLAIN, **still, operations=1, excluded=others), generator())
    if only in COLOUR_OPERATIONS:
        operation, low, high = COLOUR_OPERATIONS[only]
        assert torch.allclose(view, operation(images, low + (high - low) * drawn).float(), atol=1e-2)
    else:
        assert torch.allclose(view[0], images[0].float(), atol=1) == (only == "identity")


def test_geometric_operations_are_applied_in_the_order_of_their_slots():
    allowed = ["rotate", "translate_x"]
    drawn = torch.tensor([[0], [1]])  # first turn by 30 degrees, then shift
    strength = torch.ones(2, 1)
    merged = views._merged_maps(allowed, drawn, strength)
    image = smooth()[:1].float()
    whole = (WHOLE, torch.ones(1))
    turned = warp(image, *whole, GEOMETRIC_OPERATIONS["rotate"][0](torch.tensor([30.0])), 48)
    expected = warp(turned, *whole, GEOMETRIC_OPERATIONS["translate_x"][0](torch.tensor([0.1])), 48)
    difference = (warp(image, *whole, merged, 48) - expected).abs()
    assert difference.median() < 1
    assert math.isclose(float(merged[0, 0, 2]), 0.2 * math.cos(math.pi / 6), abs_tol=1e-6)


def test_colour_operations_follow_one_another_on_the_same_image():
    allowed = ["posterize", "solarize", "identity"]
    drawn = torch.tensor([[0, 2, 1, 0], [1, 0, 2, 2]])
    strength = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]])
    images = noise(4, 32)
    expected = images.clone()
    posterize, solarize = (COLOUR_OPERATIONS[name][0] for name in ("posterize", "solarize"))
    steps = [(0, posterize, 4.4), (0, solarize, 128.0), (1, posterize, 6.4), (2, solarize, 76.8), (3, posterize, 5.6)]
    for index, operation, value in steps:
        expected[[index]] = operation(expected[[index]], torch.tensor([value]))
    sorted_draws = views._sort_by_operation(drawn, strength, len(allowed))
    assert torch.equal(views._recolour(images, allowed, *sorted_draws), expected)


def test_bad_input_is_refused_in_words():
    settings = ViewSettings(32, **PLAIN)
    with pytest.raises(UserError, match="uint8"):
        plain_view(torch.rand(2, 3, 32, 32), settings)
    with pytest.raises(UserError, match="square"):
        weak_view(torch.zeros(2, 3, 32, 30, dtype=torch.uint8), settings, generator())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"excluded": ("rotat",)}, "rotat"),
        ({"excluded": OPERATIONS}, "every operation"),
        ({"crop_scale": 0.0}, "crop_scale"),
        ({"aspect": (2, 1)}, "aspect"),
        ({"operations": -1}, "operations"),
        ({"std": (1, 0, 1)}, "std"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        ViewSettings(32, **(PLAIN | wrong))
