"""Measure how well images fit a network, without labels, by the statistics that its BatchNorm layers remember."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.data.views.operations import resize
from cdc_plugin.errors import CheckpointError, DataError
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
# The facts of one variant, sorted by name: (("padding", 2),), say; facts left out are those of the backbone.
Variant = tuple[tuple[str, Any], ...]

NORMALISATIONS: dict[str, Normalisation] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
    # The deviation within images instead of over all pixels, as many CIFAR scripts have it.
    "cifar10_within": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.201)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
# Normalisations, beside the present one, that pass from the first layer's test to the whole network's.
FINALISTS = 2
# Images of the first comparison and of the second, between variants it left close together: with 32 images
# the choice between two paddings was seen to go wrong, with 256 it was not. Large ones fill the memory sooner.
QUICK_LOOK, CLOSE_LOOK, CLOSE_LOOK_LARGE = 32, 256, 64
CLOSE_RATIO, CLOSE_VARIANTS = 1.5, 4


class Comparison:
    """Mismatches between images (N, 3, S, S) in 0..255 and variants of a backbone: stem, normalisation, image size."""

    def __init__(self, backbone: Backbone, pixels: Tensor, normalisations: Mapping[str, Normalisation]) -> None:
        if pixels.ndim != 4 or pixels.shape[1] != 3 or len(pixels) == 0:
            raise DataError(f"expected images of shape (N, 3, S, S), found {tuple(pixels.shape)}")
        self.backbone = backbone
        # Without twins, which agree within 0.01 in every number; "given" is the backbone's own.
        self.normalisations: dict[str, Normalisation] = {}
        for name, pair in {"given": input_of(backbone), **normalisations}.items():
            others = self.normalisations.values()
            if all((torch.tensor(pair) - torch.tensor(other)).abs().max() > 0.01 for other in others):
                self.normalisations[name] = pair
        self.few = sample(pixels, QUICK_LOOK, backbone)
        self.more = sample(pixels, CLOSE_LOOK if pixels.shape[-1] <= 64 else CLOSE_LOOK_LARGE, backbone)
        self.mismatches: dict[Variant, float] = {}
        self._networks: dict[Variant, nn.Module] = {}

    def nearest_normalisations(self, stems: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return "given" and the others that suit the first layer best, which costs a hundredth of the network."""
        networks = [self._network(stem) for stem in stems]
        at_entry = {
            name: min(layer_mismatches(network, normalise(self.few, pair), 1)[0] for network in networks)
            for name, pair in self.normalisations.items()
            if name != "given"
        }
        return ["given", *sorted(at_entry, key=lambda name: at_entry[name])[:FINALISTS]]

    def measure(self, variant: Variant) -> float:
        """Return the mismatch of a variant on a few images, measured once."""
        if variant not in self.mismatches:
            self.mismatches[variant] = self._measure(variant, self.few)
        return self.mismatches[variant]

    def look_closer(self, always: Iterable[Variant] = ()) -> list[Variant]:
        """Measure the variants close to the best, and some always, on more images; return all, best first."""
        if len(self.more) > len(self.few):
            limit = CLOSE_RATIO * min(self.mismatches.values())
            ranked = sorted(self.mismatches, key=self.mismatches.__getitem__)
            close = [variant for variant in ranked if self.mismatches[variant] <= limit][:CLOSE_VARIANTS]
            for variant in {*always, *close}:
                self.mismatches[variant] = self._measure(variant, self.more)
        return sorted(self.mismatches, key=self.mismatches.__getitem__)

    def _measure(self, variant: Variant, pixels: Tensor) -> float:
        facts = dict(variant)
        pair = self.normalisations[facts.pop("normalisation", "given")]
        pixels = resize(pixels, facts.pop("size", pixels.shape[-1]))
        return batchnorm_mismatch(self._network(facts), normalise(pixels, pair))

    def _network(self, stem: Mapping[str, Any]) -> nn.Module:
        key = tuple(sorted(stem.items()))
        if key not in self._networks:
            self._networks[key] = with_stem(self.backbone, stem)
        return self._networks[key]


def batchnorm_mismatch(backbone: nn.Module, images: Tensor) -> float:
    """Return how far activations are from what the BatchNorm layers remember, averaged over layers; 0 is agreement.

    A layer counts the mean over its channels of |difference of means| / deviation + |log ratio of variances|.
    The images (N, 3, H, W) are normalised.

    >>> layer = nn.BatchNorm2d(1, eps=0.0)  # remembers mean 0 and variance 1
    >>> batchnorm_mismatch(layer, torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))  # mean 2, variance 1
    2.0
    """
    layers = layer_mismatches(backbone, images, first_layers=None)
    if not layers:
        raise CheckpointError("the backbone has no BatchNorm statistics to compare with; state mean, std and --arch")
    return sum(layers) / len(layers)


def candidate_normalisations(pixels: Tensor) -> dict[str, Normalisation]:
    """Return the usual statistics and those of images in 0..255, over all channels together and for each channel."""
    values = pixels.double() / 255
    # Constant images would give a deviation of 0.
    pooled = (values.mean().item(),) * 3, (max(values.std().item(), 1e-3),) * 3
    by_channel = (tuple(values.mean(dim=(0, 2, 3)).tolist()), tuple(values.std(dim=(0, 2, 3)).clamp_min(1e-3).tolist()))
    return NORMALISATIONS | {"own": pooled, "own_by_channel": by_channel}


def with_stem(backbone: Backbone, stem: Mapping[str, Any]) -> nn.Module:
    """Return the backbone's network with other facts of its stem; the network itself if there are none."""
    if not stem or backbone.spec is None:
        return backbone.module
    network, _ = build(backbone.spec | {"stem": backbone.spec["stem"] | dict(stem)})
    network.load_state_dict(backbone.module.state_dict())
    return network.to(backbone.mean.device)


def sample(pixels: Tensor, count: int, backbone: Backbone) -> Tensor:
    """Return at most ``count`` images, evenly spread, in [0, 1] on the backbone's device."""
    return pixels[spread_indices(len(pixels), count)].to(backbone.mean.device).float() / 255


def spread_indices(count: int, wanted: int) -> Tensor:
    """Return up to ``wanted`` indices, evenly spread over ``count`` images."""
    return torch.linspace(0, count - 1, min(count, wanted)).long()


def input_of(backbone: Backbone) -> Normalisation:
    """Return mean and std of a backbone."""
    return tuple(backbone.mean.tolist()), tuple(backbone.std.tolist())


def normalise(pixels: Tensor, pair: Normalisation) -> Tensor:
    """Return images in [0, 1] minus the mean, divided by std."""
    mean, std = (torch.tensor(numbers, device=pixels.device).view(1, 3, 1, 1) for numbers in pair)
    return (pixels - mean) / std


def has_statistics(network: nn.Module) -> bool:
    """Return whether a network has BatchNorm layers that remember their training."""
    return any(isinstance(m, nn.BatchNorm2d) and m.running_mean is not None for m in network.modules())


def layer_mismatches(network: nn.Module, images: Tensor, first_layers: int | None) -> list[float]:
    """Return one number per BatchNorm layer, in the order of the forward pass, which ends after ``first_layers``."""
    mismatches: list[float] = []

    def compare(layer: nn.Module, inputs: Sequence[Tensor]) -> None:
        assert isinstance(layer, nn.BatchNorm2d)
        if layer.running_mean is None or layer.running_var is None:
            return
        variance, mean = torch.var_mean(inputs[0].float(), dim=(0, 2, 3), correction=0)
        remembered = layer.running_var + layer.eps
        shift = (mean - layer.running_mean).abs() / remembered.sqrt()
        spread = ((variance + layer.eps) / remembered).log().abs()
        mismatches.append(float((shift + spread).mean()))
        if len(mismatches) == first_layers:
            raise _SeenEnough

    hooks = [m.register_forward_pre_hook(compare) for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    training = network.training
    try:
        with torch.no_grad():
            network.eval()(images)
    except _SeenEnough:
        pass
    finally:
        network.train(training)
        for hook in hooks:
            hook.remove()
    return mismatches


class _SeenEnough(Exception):  # noqa: N818  (a way out of a forward pass, not an error)
    pass
