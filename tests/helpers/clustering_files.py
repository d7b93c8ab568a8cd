"""Small networks with the statistics of a training, and files as clustering frameworks write them."""

import torch
from torch import nn

from cdc_plugin.models.architectures import build

CIFAR_STEM = {"kernel": 3, "stride": 1, "padding": 1, "pool": False}
STL_STEM = {"kernel": 3, "stride": 1, "padding": 1, "pool": True, "pool_kernel": 2}
LARGE_STEM = {"kernel": 7, "stride": 2, "padding": 3, "pool": True}
WIDTHS = [8, 8, 16, 48]


def images(size, count=8):
    """Smooth random images (count, 3, size, size), unlike noise of different neighbours."""
    coarse = torch.rand(count, 3, size // 4, size // 4, generator=torch.Generator().manual_seed(5))
    return nn.functional.interpolate(coarse, size=size, mode="bicubic") * 4 - 2


def with_statistics(module, *inputs):
    """The module in evaluation mode, its BatchNorm layers as if trained on these inputs."""
    randomness = torch.Generator().manual_seed(3)
    for layer in module.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            layer.weight.data = 0.5 + torch.rand(layer.weight.shape, generator=randomness)
            layer.bias.data = 0.2 * torch.randn(layer.bias.shape, generator=randomness)
            layer.momentum = None
    with torch.no_grad():
        module.train()(*inputs)
    return module.eval()


def resnet(stem, size, depths=(2, 2, 2, 2)):
    """A narrow ResNet under torchvision's names."""
    torch.manual_seed(0)
    spec = {"family": "resnet", "block": "basic", "depths": list(depths), "widths": WIDTHS, "stem": stem}
    return with_statistics(build(spec)[0], images(size))


def mlp(*kinds, inputs=WIDTHS[3], clusters=10):
    """A head as nn.Sequential: the last linear layer gives the clusters, the others keep the size."""
    layers = {"norm": lambda: nn.BatchNorm1d(inputs), "relu": nn.ReLU, "linear": lambda: nn.Linear(inputs, inputs)}
    made = [layers[kind]() for kind in kinds[:-1]] + [nn.Linear(inputs, clusters)]
    return with_statistics(nn.Sequential(*made), torch.randn(64, inputs, generator=torch.Generator().manual_seed(4)))


def named(prefix, module, shortcut=False):
    """State dict below a prefix; with ``shortcut`` for ``downsample``, as SCAN names it."""
    state = module.state_dict() if isinstance(module, nn.Module) else module
    return {prefix + (key.replace("downsample", "shortcut") if shortcut else key): v for key, v in state.items()}


def computed(*modules, given):
    """What modules give one after the other."""
    with torch.no_grad():
        for module in modules:
            given = module.eval()(given)
    return given
