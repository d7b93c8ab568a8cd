"""Small models with random weights that several test files export."""

import torch
from torch import nn

from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
RESNET18 = {"family": "resnet", "block": "basic", "depths": [2, 2, 2, 2], "widths": [64, 128, 256, 512]}
SMALL_STEM = {"kernel": 3, "stride": 1, "padding": 2, "pool": False}
SMALL_RESNET18 = {**RESNET18, "stem": SMALL_STEM}
TINY_RESNET = {**SMALL_RESNET18, "depths": [1, 1, 1, 1], "widths": [8, 8, 8, 8]}
SHUFFLENET = {"family": "torchvision", "name": "shufflenet_v2_x0_5", "kwargs": {}}
TEST_VIT = {"family": "timm", "name": "test_vit", "kwargs": {"img_size": 32, "num_heads": 4, "patch_size": 8}}
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def mlp_head(feature_dim):
    return ClusterHead(feature_dim, 6, 4)


def clusterer(spec, make_head=mlp_head):
    """A model of 4 clusters with random weights and BatchNorm statistics that are not those of a new layer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network, feature_dim = build(spec)
        heads = [make_head(feature_dim) for _ in range(2)]
        for layer in (layer for part in (network, *heads) for layer in part.modules()):
            if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
                layer.running_mean.uniform_(-0.2, 0.2)
                layer.running_var.uniform_(0.5, 1.5)
                nn.init.uniform_(layer.weight, 0.5, 1.0)
                nn.init.uniform_(layer.bias, -0.2, 0.2)
    return Clusterer(Backbone(network, feature_dim, MEAN, STD, 32, spec), *heads).eval()


def result_folder(folder, spec, make_head=mlp_head):
    folder.mkdir()
    clusterer(spec, make_head).save(folder, {"epochs": 3})
    return folder


class OwnNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, images):
        return self.layers(images)
