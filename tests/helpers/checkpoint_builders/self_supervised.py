"""Files of solo-learn, lightly, lightly-train and of the well-known self-supervised methods' own code."""

import contextlib
import json
import sys
import types
from functools import partial

import pytest
import timm
import torch
from omegaconf import OmegaConf
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision import models

from tests.helpers.checkpoint_builders import Case
from tests.helpers.checkpoint_builders.networks import LARGE_STEM, SoloWideResNet, named, resnet, with_noise

HEAD = nn.Linear(4, 4)
OPEN = {"mean", "std", "input_size"}
SOLO_CIFAR10 = [0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]
SOLO_CIFAR_OLD = [0.4914, 0.4822, 0.4465], [0.247, 0.243, 0.261]


@contextlib.contextmanager
def foreign_class(module, name):
    """Give a class of a package that is not installed, for as long as it is pickled."""
    parts = module.split(".")
    packages = [".".join(parts[: count + 1]) for count in range(len(parts))]
    sys.modules.update({package: types.ModuleType(package) for package in packages})
    made = type(name, (), {"__module__": module})
    setattr(sys.modules[module], name, made)
    try:
        yield made
    finally:
        for package in packages:
            del sys.modules[package]


def solo_args(network, method="byol", dataset="cifar10", size=32, **kwargs):
    """Return the nested arguments of releases from 1.0.6 on, with a reference as users leave them."""
    return {
        "name": f"{method}-{dataset}",
        "method": method,
        "backbone": {"name": network, "kwargs": kwargs},
        "data": {"dataset": dataset, "train_path": "./datasets", "format": "image_folder", "num_classes": 10},
        "augmentations": [{"crop_size": size, "num_crops": 2, "name": "${data.dataset}"}],
        "optimizer": "<not serializable>",
    }


def solo_run(folder, args, network, prefix="backbone.", average=None, **more):
    """Write a run's folder: the Lightning checkpoint and ``args.json``."""
    state = named(prefix, network) | named("classifier.", nn.Linear(4, 10))
    state |= named(f"momentum_{prefix}", average) if average is not None else {}
    payload = {"epoch": 7, "global_step": 70, "pytorch-lightning_version": "2.1.2", "state_dict": state} | more
    torch.save(payload, folder / "run-ep=7.ckpt")
    (folder / "args.json").write_text(json.dumps(args))
    return folder


def cifar_resnet(padding, seed=0, make=models.resnet18):
    """Return torchvision's network with the stem that solo-learn gives it for CIFAR."""
    network = make()
    network.conv1 = nn.Conv2d(3, 64, 3, 1, padding, bias=False)
    network.maxpool = network.fc = nn.Identity()
    return with_noise(network, seed)


def solo_wide_resnet(folder):
    """A run that leaves objects of solo-learn and omegaconf in its optimiser's part."""
    network = with_noise(SoloWideResNet())
    settings = OmegaConf.create({"lr": 0.1, "names": ["a", "b"]})
    with foreign_class("solo.utils.lars", "LARS") as optimiser:
        left = {"optimizer_states": [{"settings": settings, "made_by": optimiser, "step": partial(int, "7")}]}
        path = solo_run(folder, solo_args("wide_resnet28w2"), network, **left)
    return Case(path, "solo-learn", network, statistics=SOLO_CIFAR10, inferred=set())


def solo_mae(folder):
    norm = partial(nn.LayerNorm, eps=1e-6)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 12, "num_heads": 12}
    network = with_noise(VisionTransformer(num_classes=0, norm_layer=norm, **sizes))
    args = solo_args("vit_tiny", "mae", img_size=32, patch_size=8)
    return Case(solo_run(folder, args, network), "solo-learn", network, statistics=SOLO_CIFAR10, inferred=set())


def solo_before_1_0_3(folder):
    """Flat arguments, and a network called encoder with its moving average."""
    network, average = cifar_resnet(2), cifar_resnet(2, seed=1)
    args = {"dataset": "cifar10", "method": "byol", "encoder": "resnet18", "backbone_args": {"cifar": True}}
    path = solo_run(folder, args, network, "encoder.", average)
    return Case(path, "solo-learn", network, statistics=SOLO_CIFAR_OLD, inferred=set(), average=average)


def solo_fork_of_cdc(folder):
    network = cifar_resnet(1)
    args = solo_args("resnet18", "mocov2plus") | {"process_bar": {}}
    return Case(solo_run(folder, args, network), "solo-learn", network, statistics=SOLO_CIFAR10, inferred=set())


def lightning(folder, **parts):
    """Write a file as pl.Trainer does."""
    state = {key: value for name, part in parts.items() for key, value in named(f"{name}.", part).items()}
    payload = {"epoch": 4, "global_step": 10, "pytorch-lightning_version": "2.6.0", "state_dict": state}
    torch.save(payload, folder / "epoch=4-step=10.ckpt")
    return folder / "epoch=4-step=10.ckpt"


def listed(network):
    """Return the children of a network in nn.Sequential, as lightly's examples do."""
    layers = [network.conv1, network.bn1, nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*layers, *(getattr(network, f"layer{stage}") for stage in range(1, 5)))


def lightly_sequential(folder):
    network = resnet(LARGE_STEM, 64)
    path = lightning(folder, backbone=listed(network), projection_head=HEAD)
    return Case(path, "lightly", network, size=224, side=64, inferred=OPEN)


def lightly_named(folder):
    online, average = resnet(LARGE_STEM, 64), resnet(LARGE_STEM, 64, seed=1)
    path = lightning(folder, backbone=online, backbone_momentum=average, projection_head=HEAD)
    return Case(path, "lightly", online, size=224, side=64, average=average)


def lightly_own_resnet(folder):
    library = pytest.importorskip("lightly.models", reason="lightly is not installed")
    network = with_noise(library.ResNetGenerator("resnet-9", width=0.125))
    network.linear = nn.Identity()
    return Case(lightning(folder, backbone=network), "lightly", network, inferred=OPEN)


def wrapped(network, inner):
    return nn.ModuleDict({"wrapped_model": nn.ModuleDict({inner: network})})


def lightly_train_payload(normalize=None, **parts):
    state = {key: value for name, part in parts.items() for key, value in named(f"{name}.", part).items()}
    record = {"version": "0.18.0", "date": "2026-01-01", "models": {}, "normalize_args": normalize or {}}
    return {"epoch": 1, "pytorch-lightning_version": "2.6.0", "state_dict": state, "lightly_train": record}


def lightly_train_exported(folder, state):
    (folder / "exported_models").mkdir()
    torch.save(state, folder / "exported_models" / "exported_last.pt")
    return folder / "exported_models" / "exported_last.pt"


def lightly_train_teacher(folder):
    student, teacher = resnet(LARGE_STEM, 64), resnet(LARGE_STEM, 64, seed=1)
    statistics = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    parts = {"teacher_embedding_model": wrapped(teacher, "_features"), "teacher_projection_head": HEAD}
    parts |= {"student_embedding_model": wrapped(student, "_features")}
    payload = lightly_train_payload(dict(zip(("mean", "std"), statistics, strict=True)), **parts)
    torch.save(payload, folder / "last.ckpt")
    path = folder / "last.ckpt"
    return Case(path, "lightly-train", teacher, (), statistics, 224, 64, {"input_size"}, average=teacher)


class MapMean(nn.Module):
    """The mean of the patch tokens or of the last map of a timm network, which lightly-train embeds with."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, pixels):
        last = self.network.forward_intermediates(pixels, norm=True, intermediates_only=True)[-1]
        return last.mean(dim=(2, 3))


def lightly_train_transformer(folder):
    network = with_noise(timm.create_model("test_vit", num_classes=3))
    payload = lightly_train_payload(embedding_model=wrapped(network, "_model"))
    torch.save(payload, folder / "last.ckpt")
    return Case(folder / "last.ckpt", "lightly-train", MapMean(network), size=160, side=160)


def lightly_train_headless(folder):
    """A run whose record keeps the model: named, with a head that is never trained, and a foreign teacher beside it."""
    network = with_noise(timm.create_model("test_efficientnet", num_classes=3))
    payload = lightly_train_payload(teacher_embedding_model=wrapped(resnet(LARGE_STEM, 64), "_model"))
    payload["lightly_train"]["models"] = {"model": network}
    torch.save(payload, folder / "last.ckpt")
    return Case(folder / "last.ckpt", "lightly-train", MapMean(network), size=160, side=160)


def lightly_train_convnext(folder):
    network = with_noise(models.convnext_tiny())
    path = lightly_train_exported(folder, network.state_dict())
    network.classifier = nn.Flatten(1)
    return Case(path, "lightly-train", network, size=224, side=64)


def lightly_train_dinov2(folder):
    network = with_noise(timm.create_model("vit_small_patch14_dinov2", img_size=28, num_classes=0))
    path = lightly_train_exported(folder, network.state_dict() | {"mask_token": torch.zeros(1, 384)})
    return Case(path, "lightly-train", network, size=28, side=28)


def lightly_train_dinov3(folder):
    """DINOv3's own names, as lightly-train exports them; timm would average the patch tokens."""
    network = with_noise(timm.create_model("vit_tiny_patch16_dinov3_qkvb", num_classes=0, global_pool="token"))
    own = {"reg_token": "storage_tokens", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    state = {"mask_token": torch.zeros(1, 192)}
    for key, value in network.state_dict().items():
        block, _, last = key.rpartition(".")
        if last == "q_bias":
            biases = value, torch.zeros_like(value), network.state_dict()[f"{block}.v_bias"]
            state[f"{block}.qkv.bias"] = torch.cat(biases)
        elif last != "v_bias":
            state[f"{block}.{own.get(last, last)}".lstrip(".")] = value
    return Case(lightly_train_exported(folder, state), "lightly-train", network, size=256, side=64)


def lightly_train_export(folder):
    network = with_noise(timm.create_model("test_resnet", num_classes=3))
    path = lightly_train_exported(folder, network.state_dict())
    network.reset_classifier(0)
    return Case(path, "lightly-train", network, size=160)


def moco_v3(folder):
    online, average = resnet(LARGE_STEM, 64), resnet(LARGE_STEM, 64, seed=1)
    state = named("module.base_encoder.", online) | named("module.momentum_encoder.", average)
    torch.save({"epoch": 3, "state_dict": state | named("module.predictor.", HEAD)}, folder / "a.pth.tar")
    return Case(folder / "a.pth.tar", "generic", online, size=224, side=64, average=average)


def simsiam(folder):
    network = resnet(LARGE_STEM, 64)
    state = named("module.encoder.", network) | named("module.predictor.", HEAD)
    torch.save({"epoch": 3, "arch": "resnet18", "state_dict": state}, folder / "a.pth.tar")
    return Case(folder / "a.pth.tar", "generic", network, size=224, side=64, inferred=OPEN)


def swav(folder):
    network = resnet(LARGE_STEM, 64)
    state = named("module.", network) | named("module.projection_head.", HEAD) | named("module.prototypes.", HEAD)
    torch.save(state, folder / "swav.pth.tar")
    return Case(folder / "swav.pth.tar", "generic", network, size=224, side=64, inferred=OPEN)


def dino(folder):
    student, teacher = resnet(LARGE_STEM, 64), resnet(LARGE_STEM, 64, seed=1)
    payload = {"student": named("module.backbone.", student), "teacher": named("backbone.", teacher), "epoch": 1}
    torch.save(payload, folder / "checkpoint.pth")
    return Case(folder / "checkpoint.pth", "lightly", teacher, size=224, side=64, average=teacher)


def mae(folder):
    network = with_noise(timm.create_model("test_vit", num_classes=0))
    decoder = {"decoder_embed.weight": torch.ones(2, 2), "decoder_blocks.0.norm1.weight": torch.ones(2)}
    extra = {"mask_token": torch.zeros(1, 1, 2), "decoder_pos_embed": torch.zeros(1, 2, 2)}
    torch.save({"model": network.state_dict() | decoder | extra}, folder / "a.pth")
    return Case(folder / "a.pth", "generic", network, size=160, side=160, inferred={"mean", "std"})


BUILDERS = (
    *(solo_wide_resnet, solo_mae, solo_before_1_0_3, solo_fork_of_cdc),
    *(lightly_sequential, lightly_named, lightly_own_resnet),
    *(lightly_train_teacher, lightly_train_transformer, lightly_train_headless, lightly_train_convnext),
    *(lightly_train_dinov2, lightly_train_dinov3, lightly_train_export),
    *(moco_v3, simsiam, swav, dino, mae),
)
