"""Small ResNets whose BatchNorm layers remember images, as after a training on them."""

import torch
from torch import nn

from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone


def smooth_images():
    """Return coloured blobs (48, 3, 32, 32) in 0..255, darker than ImageNet."""
    coarse = torch.rand(48, 3, 5, 5, generator=torch.Generator().manual_seed(0)).pow(2)
    return nn.functional.interpolate(coarse, size=32, mode="bicubic").clamp(0, 1).mul(200).byte()


def noise_like(images, levels=2):
    noise = torch.randint(0, levels, images.shape, generator=torch.Generator().manual_seed(2))
    return noise.mul(255 // (levels - 1)).byte()


def small_spec(**stem):
    usual = {"kernel": 3, "stride": 1, "padding": 1, "pool": False}
    return {"family": "resnet", "block": "basic", "depths": [1] * 4, "widths": [8, 8, 12, 16], "stem": usual | stem}


def network_that_saw(images, spec, normalisation):
    """Return a network in evaluation mode whose BatchNorm layers hold the statistics of these images."""
    generator = torch.Generator().manual_seed(1)
    network, _ = build(spec)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = torch.randn(module.weight.shape, generator=generator) * 0.1
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.bias.data = torch.randn(module.bias.shape, generator=generator) * 0.3
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in normalisation)
    with torch.no_grad():
        network.train()((images.float() / 255 - mean) / std)
    return network.eval()


def backbone_with(network, spec, normalisation="imagenet", inferred=(), size=32):
    """Return a backbone with the weights of a network, but the stem and normalisation stated here."""
    stated, feature_dim = build(spec)
    stated.load_state_dict(network.state_dict())
    return Backbone(stated.eval(), feature_dim, *NORMALISATIONS[normalisation], size, spec, inferred)
