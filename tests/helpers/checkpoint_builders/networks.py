"""Small networks in plain torch, independent of the package, with statistics as if they had been trained."""

import torch
import torch.nn.functional as F
from torch import nn

CIFAR_STEM = {"kernel": 3, "stride": 1, "padding": 1, "pool": False}
STL_STEM = {"kernel": 3, "stride": 1, "padding": 1, "pool": True, "pool_kernel": 2}
LARGE_STEM = {"kernel": 7, "stride": 2, "padding": 3, "pool": True}
WIDTHS = [8, 8, 16, 48]


class Block(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.downsample = nn.Sequential()
        if stride > 1 or inputs != width:
            self.downsample.extend([nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)])

    def forward(self, maps):
        hidden = F.relu(self.bn1(self.conv1(maps)))
        return F.relu(self.bn2(self.conv2(hidden)) + self.downsample(maps))


class ResNet(nn.Module):
    """A ResNet under torchvision's names; ``fc`` may be replaced by a layer that features pass."""

    def __init__(self, stem, depths, widths):
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], stem["kernel"], stem["stride"], stem["padding"], bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.pool = nn.MaxPool2d(stem.get("pool_kernel", 3), 2, 1) if stem["pool"] else nn.Identity()
        inputs = [widths[0], *widths[:3]]
        for stage in range(4):
            blocks = [Block(inputs[stage], widths[stage], 2 if stage else 1)]
            blocks += [Block(widths[stage], widths[stage], 1) for _ in range(depths[stage] - 1)]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Identity()

    def forward(self, pixels):
        maps = self.pool(F.relu(self.bn1(self.conv1(pixels))))
        maps = self.layer4(self.layer3(self.layer2(self.layer1(maps))))
        return self.fc(maps.mean(dim=(2, 3)))


class WideBlock(nn.Module):
    """Pre-activation with leaky ReLU, where ``activate`` is set; a shortcut with a convolution starts after it."""

    def __init__(self, inputs, width, stride, epsilon, bias, project, activate=True):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(inputs, epsilon), nn.BatchNorm2d(width, epsilon)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=bias)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=bias)
        self.convShortcut = nn.Conv2d(inputs, width, 1, stride, bias=bias) if project else None
        self.activate = activate

    def forward(self, maps):
        active = F.leaky_relu(self.bn1(maps), 0.1) if self.activate else maps
        hidden = self.conv2(F.leaky_relu(self.bn2(self.conv1(active)), 0.1))
        return hidden + (maps if self.convShortcut is None else self.convShortcut(active))


class WideResNet(nn.Module):
    """FixMatch's wide ResNet as in SPICE: every block activates its input."""

    def __init__(self, depth, widths, strides, epsilon=1e-5, bias=False):
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=bias)
        self.stages = [f"block{number}" for number in range(1, len(widths))]
        for name, inputs, width, stride in zip(self.stages, widths[:-1], widths[1:], strides, strict=True):
            blocks = [self.make_block(name, inputs, width, stride, epsilon, bias)]
            blocks += [WideBlock(width, width, 1, epsilon, bias, project=False) for _ in range(depth - 1)]
            stage = nn.Module()
            stage.layer = nn.Sequential(*blocks)
            setattr(self, name, stage)
        self.bn1 = nn.BatchNorm2d(widths[-1], epsilon)

    def make_block(self, _name, inputs, width, stride, epsilon, bias):
        return WideBlock(inputs, width, stride, epsilon, bias, project=inputs != width)

    def forward(self, pixels):
        maps = self.conv1(pixels)
        for name in self.stages:
            maps = getattr(self, name).layer(maps)
        return F.leaky_relu(self.bn1(maps), 0.1).mean(dim=(2, 3))


class SoloWideResNet(WideResNet):
    """solo-learn's WRN-28-2: biases, another epsilon, and only the first stage activates before its shortcut."""

    def __init__(self):
        super().__init__(4, [16, 32, 64, 128], [1, 2, 2], epsilon=1e-3, bias=True)

    def make_block(self, name, inputs, width, stride, epsilon, bias):
        return WideBlock(inputs, width, stride, epsilon, bias, project=True, activate=name == "block1")


def images(size, count=8):
    """Return smooth random images (count, 3, size, size), whose neighbouring pixels are alike."""
    coarse = torch.rand(count, 3, size // 4, size // 4, generator=torch.Generator().manual_seed(5))
    return F.interpolate(coarse, size=size, mode="bicubic") * 4 - 2


def with_statistics(module, *inputs):
    """Return the module in evaluation mode, its BatchNorm layers as if trained on these inputs."""
    randomness = torch.Generator().manual_seed(3)
    for layer in module.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            layer.weight.data = 0.5 + torch.rand(layer.weight.shape, generator=randomness)
            layer.bias.data = 0.2 * torch.randn(layer.bias.shape, generator=randomness)
            layer.momentum = None
    with torch.no_grad():
        module.train()(*inputs)
    return module.eval()


def with_noise(network, seed=0):
    """Return the network in evaluation mode; no weight or statistic hides behind its initial value."""
    randomness = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in network.state_dict().values():
            if value.is_floating_point() and value.ndim > 1:
                value.copy_(value.std().clamp(min=0.02) * torch.randn(value.shape, generator=randomness))
            elif value.is_floating_point():
                value.add_(0.2 * torch.rand(value.shape, generator=randomness))
    return network.eval()


def resnet(stem, size, depths=(2, 2, 2, 2), seed=0):
    """Return a narrow ResNet with statistics of images of this size."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return with_statistics(ResNet(stem, depths, WIDTHS), images(size))


def mlp(*kinds, inputs=WIDTHS[3], clusters=10):
    """Return a head as nn.Sequential: the last linear layer gives the clusters, the others keep the size."""
    layers = {"norm": lambda: nn.BatchNorm1d(inputs), "relu": nn.ReLU, "linear": lambda: nn.Linear(inputs, inputs)}
    made = [layers[kind]() for kind in kinds[:-1]] + [nn.Linear(inputs, clusters)]
    return with_statistics(nn.Sequential(*made), torch.randn(64, inputs, generator=torch.Generator().manual_seed(4)))


def named(prefix, module, shortcut=False):
    """Return the state dict below a prefix; with ``shortcut`` for ``downsample``, as SCAN names it."""
    state = module.state_dict() if isinstance(module, nn.Module) else module
    return {prefix + (key.replace("downsample", "shortcut") if shortcut else key): v for key, v in state.items()}


def computed(*modules, given):
    """Return the output of modules one after the other."""
    with torch.no_grad():
        for module in modules:
            given = module.eval()(given)
    return given
