"""Files that timm and torchvision write themselves, and the folders of this package."""

import argparse
import json

import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from timm.utils import CheckpointSaver
from torch import nn
from torchvision import models

from tests.helpers.checkpoint_builders import IMAGENET, Case
from tests.helpers.checkpoint_builders.networks import CIFAR_STEM, WIDTHS, mlp, named, resnet, with_noise

HALF = [0.5] * 3, [0.5] * 3


def created(name, **settings):
    return with_noise(timm.create_model(name, **settings))


def timm_state(folder):
    network = created("test_resnet", num_classes=7)
    torch.save(network.state_dict(), folder / "weights.pth")
    network.reset_classifier(0)
    path, inferred = folder / "weights.pth", {"mean", "std", "input_size"}
    return Case(path, "timm", network, statistics=HALF, size=160, inferred=inferred)


def timm_training(folder):
    """The checkpoint of timm's train.py, written by its own saver, with the average of the weights."""
    network = created("test_vit", num_heads=4, img_size=32, patch_size=4)
    settings = {"num_heads": 4, "img_size": 32, "patch_size": 4, "checkpoint_path": "/etc/passwd"}
    average = with_noise(timm.create_model("test_vit", num_heads=4, img_size=32, patch_size=4), seed=1)
    args = argparse.Namespace(model="test_vit", model_kwargs=settings, img_size=None, mean=[0.1], std=None)
    optimiser = torch.optim.SGD(network.parameters(), 0.1)
    saver = CheckpointSaver(network, optimiser, args, checkpoint_dir=str(folder), recovery_dir=str(folder))
    saver.save_checkpoint(epoch=3, metric=0.5)
    payload = torch.load(folder / "last.pth.tar", weights_only=False)
    torch.save(payload | {"state_dict_ema": named("module.", average)}, folder / "last.pth.tar")
    network.reset_classifier(0)
    average.reset_classifier(0)
    path, statistics = folder / "last.pth.tar", ([0.1] * 3, HALF[1])
    return Case(path, "timm", network, statistics=statistics, inferred=set(), average=average)


def timm_hub_folder(folder):
    network = created("test_resnet")
    save_for_hf(network, folder, safe_serialization=True)
    network.reset_classifier(0)
    return Case(folder, "timm", network, statistics=HALF, size=160, inferred=set())


def torchvision_resnet(folder):
    network = with_noise(models.resnet18())
    torch.save(network.state_dict(), folder / "a.pth")
    network.fc = nn.Identity()
    inferred = {"network", "mean", "std", "input_size"}
    return Case(folder / "a.pth", "torchvision", network, size=224, side=64, inferred=inferred)


def torchvision_mobilenet(folder):
    network = with_noise(models.mobilenet_v3_small())
    torch.save(network.state_dict(), folder / "a.pth")
    network.classifier[-1] = nn.Identity()
    return Case(folder / "a.pth", "torchvision", network, size=224, side=64)


def torchvision_training(folder):
    """torchvision's reference script keeps the weights beside optimiser and arguments."""
    network = with_noise(models.shufflenet_v2_x0_5())
    args = argparse.Namespace(model="shufflenet_v2_x0_5", epochs=3)
    torch.save({"model": network.state_dict(), "optimizer": {}, "epoch": 3, "args": args}, folder / "model_3.pth")
    network.fc = nn.Identity()
    return Case(folder / "model_3.pth", "torchvision", network, statistics=IMAGENET, size=224, side=64)


def write_native(folder, network, heads, provenance):
    """Write a folder as cdc-refine and cdc-pretrain do."""
    spec = {"family": "resnet", "block": "basic", "depths": [2] * 4, "widths": WIDTHS, "stem": CIFAR_STEM}
    backbone = {"spec": spec, "feature_dim": WIDTHS[3], "mean": [0.1] * 3, "std": [0.2] * 3, "input_size": 28}
    kind = {"kind": "mlp", "hidden": WIDTHS[3], "clusters": 10} if heads else {}
    tensors = named("backbone.", network)
    for name, head in heads.items():
        tensors |= named(f"{name}.", head)
    save_file(tensors, folder / "model.safetensors")
    description = {"format": "cdc_plugin", "version": 1, "backbone": backbone, "heads": kind, "provenance": provenance}
    (folder / "model.json").write_text(json.dumps(description))


def native_result(folder):
    network = resnet(CIFAR_STEM, 32)
    heads = {name: mlp("linear", "norm", "relu", "linear") for name in ("clustering_head", "calibration_head")}
    write_native(folder, network, heads, {"epochs": 3})
    return Case(folder, "native", network, tuple(heads.values()), ([0.1] * 3, [0.2] * 3), 28, inferred=set())


def native_pretraining(folder):
    network = resnet(CIFAR_STEM, 32)
    write_native(folder, network, {}, {"tool": "cdc-pretrain", "epochs": 3})
    return Case(folder, "native", network, (), ([0.1] * 3, [0.2] * 3), 28, inferred=set())


BUILDERS = (
    *(timm_state, timm_training, timm_hub_folder),
    *(torchvision_resnet, torchvision_mobilenet, torchvision_training),
    *(native_result, native_pretraining),
)
